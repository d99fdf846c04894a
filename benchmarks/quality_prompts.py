"""Long prompts of several kinds, with several questions per text, for the benchmarks of answer quality.

The prompts of one text share its tokens, so the text is prefilled once for all of them.
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
        kind: the kind of prompt.
        tokens: token ids, including a predefined beginning of the answer, if any.
        answer: the text that the answer must contain; None for prompts without a question.
        max_new_tokens: the maximum number of decoded tokens.
    """

    kind: str
    tokens: tuple[int, ...]
    answer: str | None
    max_new_tokens: int

    def is_right(self, text: str) -> bool | None:
        """Whether `text` contains the answer, ignoring white space; None for a prompt without a question."""
        return None if self.answer is None else "".join(self.answer.split()) in "".join(text.split())


@dataclass(frozen=True)
class Request:
    """The parameters of prompts.

    Attributes:
        tokenizer: a tokenizer with a chat template.
        length: the approximate length of a prompt, tokens.
        questions: questions per text.
        continued: tokens of a continuation of prose.
        seed: the random seed.
        haystack: essays; None for the project's documentation.
    """

    tokenizer: Any
    length: int
    questions: int
    continued: int
    seed: int
    haystack: Haystack | None

    @property
    def essays(self) -> Haystack:
        """The prose for needles and continuations."""
        return self.haystack or Haystack(
            "\n\n".join(p.read_text() for p in sorted((_PROJECT / "docs").glob("*.md"))), ""
        )

    def chat_tokens(self, message: str, answer_prefix: str = "") -> tuple[int, ...]:
        """The tokens of a user message in the chat template, and of the answer's beginning."""
        chat = [{"role": "user", "content": message}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tuple(self.tokenizer(text + answer_prefix, add_special_tokens=False)["input_ids"])

    def fitted(self, build: Callable[[int], str], kind: str) -> str:
        """The text `build(units)` whose prompt is nearest to the requested length."""
        return fit(build, lambda text: len(self.chat_tokens(text)), self.length, kind).text


def shared_beginning(prompts: list[QualityPrompt]) -> int:
    """The length of the prompts' common prefix, at most all but two tokens of the shortest."""
    columns = zip(*(prompt.tokens for prompt in prompts), strict=False)
    return min(sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)), _shortest(prompts) - 2)


def _shortest(prompts: list[QualityPrompt]) -> int:
    return min(len(prompt.tokens) for prompt in prompts)


def needles(request: Request) -> list[QualityPrompt]:
    """Numbers of cities, hidden at equal distances in essays; a question per city."""
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
        QualityPrompt("needles", request.chat_tokens(f"{text}\n\nWhat is the special magic {city} number?"), value, 32)
        for city, value in zip(cities, numbers, strict=True)
    ]


def pairs(request: Request) -> list[QualityPrompt]:
    """Key-value retrieval of Lost in the middle (Liu et al. 2023): random UUIDs in a JSON object.

    The queried pairs are at equal distances. The answer's beginning is predefined, so that the model decodes the value.
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
    chosen = [records[int((i + 0.5) / request.questions * count)] for i in range(request.questions)]
    return [
        QualityPrompt(
            "pairs", request.chat_tokens(f'{text}\n\nKey: "{key}"\nCorresponding value:', 'The value is "'), value, 48
        )
        for key, value in chosen
    ]


def prose(request: Request) -> list[QualityPrompt]:
    """Essays to be continued: prompts that end at different positions in the last tenth of the length."""
    text = request.fitted(lambda words: " ".join(request.essays.take(words)), "prose")
    tokens = request.tokenizer(text, add_special_tokens=False)["input_ids"]
    ends = [round(len(tokens) * (1 - 0.1 * i / request.questions)) for i in range(request.questions)]
    return [QualityPrompt("prose", tuple(tokens[:end]), None, request.continued) for end in sorted(ends)]


def code(request: Request) -> list[QualityPrompt]:
    """The engine's source code; the question is for the line that defines a function with a unique name."""
    sources = [path.read_text() for path in sorted((_PROJECT / "hetero_kv" / "engine").rglob("*.py"))]
    lines = "\n".join(sources).splitlines()
    text = request.fitted(lambda count: "\n".join(lines[:count]), "code")
    definitions = _definitions(text)
    chosen = random.Random(f"code/{request.seed}").sample(sorted(definitions), request.questions)
    return [
        QualityPrompt(
            "code",
            request.chat_tokens(
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
