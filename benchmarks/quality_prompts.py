"""Long prompts of several kinds, several questions to each text, for the benchmarks of answer quality.

The questions to one text have its tokens in common, so that the text is prefilled once for all of them.
"""

from __future__ import annotations

import ast
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import hetero_kv
from hetero_kv.evals.haystack import Haystack, insert, position_at
from hetero_kv.evals.tasks.fitting import fit

_CITIES = ("Lisbon", "Nairobi", "Seoul", "Havana", "Oslo", "Dakar", "Vienna", "Lima")
_PROJECT = Path(hetero_kv.__file__).parent.parent


@dataclass(frozen=True)
class QualityPrompt:
    """One prompt.

    Attributes:
        kind: of which sort it is.
        tokens: token ids, the beginning of the answer included where one is given.
        answer: what the answer must contain; None where nothing is asked.
        max_new_tokens: decoded at most.
    """

    kind: str
    tokens: tuple[int, ...]
    answer: str | None
    max_new_tokens: int

    def is_right(self, text: str) -> bool | None:
        """Whether `text` contains the answer, white space aside; None where nothing is asked."""
        return None if self.answer is None else "".join(self.answer.split()) in "".join(text.split())


@dataclass(frozen=True)
class Request:
    """What prompts are made of.

    Attributes:
        tokenizer: with a chat template.
        length: tokens of a prompt, about.
        questions: to the text.
        continued: tokens that prose is continued with.
        seed: of everything random.
        haystack: essays, or None for the project's documentation.
    """

    tokenizer: Any
    length: int
    questions: int
    continued: int
    seed: int
    haystack: Haystack | None

    @property
    def essays(self) -> Haystack:
        """The prose to hide in, and to continue."""
        return self.haystack or Haystack(
            "\n\n".join(p.read_text() for p in sorted((_PROJECT / "docs").glob("*.md"))), ""
        )

    def asked(self, message: str, answer_prefix: str = "") -> tuple[int, ...]:
        """The tokens of a user's message in the chat template, and of the beginning of the answer."""
        chat = [{"role": "user", "content": message}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tuple(self.tokenizer(text + answer_prefix, add_special_tokens=False)["input_ids"])

    def fitted(self, build: Callable[[int], str], kind: str) -> str:
        """The text `build(units)` with which a prompt is nearest to the wanted length."""
        return fit(build, lambda text: len(self.asked(text)), self.length, kind).text


def shared_beginning(prompts: list[QualityPrompt]) -> int:
    """Tokens that all prompts begin with, at most all but two of the shortest."""
    columns = zip(*(prompt.tokens for prompt in prompts), strict=False)
    return min(sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)), _shortest(prompts) - 2)


def _shortest(prompts: list[QualityPrompt]) -> int:
    return min(len(prompt.tokens) for prompt in prompts)


def needles(request: Request) -> list[QualityPrompt]:
    """A number for every city, hidden at even depths of essays; one question for each."""
    rng = random.Random(f"needles/{request.seed}")
    cities = rng.sample(_CITIES, request.questions)
    numbers = [str(rng.randrange(10**6, 10**7)) for _ in cities]
    hidden = [f"The special magic {city} number is: {value}." for city, value in zip(cities, numbers, strict=True)]
    depths = [100 * (i + 0.5) / len(cities) for i in range(len(cities))]

    def build(words: int) -> str:
        sentences = request.essays.take(words)
        return " ".join(insert(sentences, hidden, [position_at(sentences, depth) for depth in depths]))

    text = request.fitted(build, "needles")
    return [
        QualityPrompt("needles", request.asked(f"{text}\n\nWhat is the special magic {city} number?"), value, 32)
        for city, value in zip(cities, numbers, strict=True)
    ]


def pairs(request: Request) -> list[QualityPrompt]:
    """Key-value retrieval of Lost in the middle (Liu et al. 2023): random UUIDs in a JSON object.

    The wanted pairs lie at even depths. The answer begins as given, so that what is decoded is the value.
    """
    rng = random.Random(f"pairs/{request.seed}")
    records: list[tuple[str, str]] = []

    def build(count: int) -> str:
        while len(records) < count:
            key, value = (str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2))
            records.append((key, value))
        lines = ",\n ".join(f'"{key}": "{value}"' for key, value in records[:count])
        return (
            f"Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{{{lines}}}"
        )

    text = request.fitted(build, "pairs")
    count = text.count('": "')
    wanted = [records[int((i + 0.5) / request.questions * count)] for i in range(request.questions)]
    return [
        QualityPrompt(
            "pairs", request.asked(f'{text}\n\nKey: "{key}"\nCorresponding value:', 'The value is "'), value, 48
        )
        for key, value in wanted
    ]


def prose(request: Request) -> list[QualityPrompt]:
    """Essays, continued: prompts that end at different places of the last tenth of the length."""
    text = request.fitted(lambda words: " ".join(request.essays.take(words)), "prose")
    tokens = request.tokenizer(text, add_special_tokens=False)["input_ids"]
    ends = [round(len(tokens) * (1 - 0.1 * i / request.questions)) for i in range(request.questions)]
    return [QualityPrompt("prose", tuple(tokens[:end]), None, request.continued) for end in sorted(ends)]


def code(request: Request) -> list[QualityPrompt]:
    """The engine's own sources; asked for the line that defines a function of which there is one."""
    sources = [path.read_text() for path in sorted((_PROJECT / "hetero_kv" / "engine").rglob("*.py"))]
    lines = "\n".join(sources).splitlines()
    text = request.fitted(lambda count: "\n".join(lines[:count]), "code")
    definitions = _definitions(text)
    chosen = random.Random(f"code/{request.seed}").sample(sorted(definitions), request.questions)
    return [
        QualityPrompt(
            "code",
            request.asked(
                f"```python\n{text}\n```\n\nQuote the line of the code above that defines the function `{name}`.",
                "```python\n",
            ),
            definitions[name],
            48,
        )
        for name in chosen
    ]


def _definitions(text: str) -> dict[str, str]:
    """Function name -> its `def` line, of functions defined once, on one line, with two arguments or more."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("def ") and line.endswith(":"):
            function = ast.parse(f"{line} ...").body[0]
            assert isinstance(function, ast.FunctionDef)
            found.setdefault(function.name, []).append(line)
    return {name: lines[0] for name, lines in found.items() if len(lines) == 1 and "," in lines[0]}


KINDS: dict[str, Callable[[Request], list[QualityPrompt]]] = {
    "needles": needles,
    "pairs": pairs,
    "prose": prose,
    "code": code,
}
