"""RULER's needles: one, several keys, several values, several queries (Hsieh et al., 2024, section 3.1, appendix B).

A needle is "One of the special magic {values} for {key} is: {value}.". Haystacks are: noise, a line per paragraph; an
essay (without one, noise), with needles between its sentences at depths drawn from 40 even steps; or other needles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_kv.evals.haystack import Haystack, insert
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.scorers import string_match_all
from hetero_kv.evals.tasks.drawing import Cell, Different, number, uuid4, word_pair
from hetero_kv.evals.tasks.fitting import adjusted
from hetero_kv.evals.tasks.generated import GeneratedTask, haystack_of
from hetero_kv.evals.tasks.registry import TaskRequest, register

DRAWN: dict[str, Callable[[random.Random], str]] = {"numbers": number, "words": word_pair, "uuids": uuid4}
MAX_NEW_TOKENS = 128
_DEPTHS = [round(100 * step / 39) for step in range(40)]
_SENTENCES_PER_LINE = 5


@dataclass(frozen=True)
class Variant:
    """The parameters of one of RULER's needle tasks.

    Attributes:
        haystack: "noise", "essay" or "needle".
        keys: the number of keys with needles.
        values: the number of needles per key.
        queries: the number of queried keys.
        key_type: "words" or "uuids".
        value_type: "numbers" or "uuids".
    """

    haystack: str
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_type: str = "words"
    value_type: str = "numbers"

    def needle(self, key: str, value: str) -> str:
        """The sentence with one value of one key."""
        return f"One of the special magic {self.value_type} for {key} is: {value}."

    def question(self, queries: Sequence[str]) -> tuple[str, str, str]:
        """The text before the haystack, the text after it, and the answer's prefix; singular for a single value."""
        names = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
        if self.queries * self.values == 1:
            some, hidden, every, kind = "A", "is", "is", self.value_type[:-1]
            are = "is"
        else:
            some, hidden, every, kind = "Some", "are", "are all", self.value_type
            are = "are"
        return (
            f"{some} special magic {kind} {hidden} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.",
            f"What {every} the special magic {kind} for {names} mentioned in the provided text?",
            f" The special magic {kind} for {names} mentioned in the provided text {are}",
        )


class RulerNiah(GeneratedTask):
    """One of RULER's eight needle tasks; the score is the share of the values that occur in the answer."""

    max_new_tokens = MAX_NEW_TOKENS

    def __init__(self, name: str, meaning: str, variant: Variant) -> None:
        self.name = f"ruler/{name}"
        self.meaning = meaning
        self.variant = variant
        self.uses_haystack = variant.haystack == "essay"

    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell; `metadata` has the queried keys."""
        variant = self.variant
        rng = cell.random("needles")
        keys = Different(lambda: DRAWN[variant.key_type](rng))
        values = Different(lambda: DRAWN[variant.value_type](rng))
        values_by_key = {key: values.take(variant.values) for key in keys.take(variant.keys)}
        needles = [variant.needle(key, value) for key, of_key in values_by_key.items() for value in of_key]
        rng.shuffle(needles)
        queries = rng.sample(list(values_by_key), variant.queries)
        before, after, prefix = variant.question(queries)
        distractors: list[str] = []

        def distractor() -> str:
            return variant.needle(keys.next(), values.next())

        context = self._context(cell, request, needles, distractors, distractor)
        prompt = self.fitted(cell, request, lambda units: f"{before}\n{context(units)}\n{after}", prefix)
        if variant.haystack == "needle":
            missing = cell.length - prompt.tokens
            kept = distractors[: prompt.units]
            distractors[: prompt.units] = adjusted(kept, missing, cell.length, distractor, request.count_tokens)
        answers = tuple(value for key in queries for value in values_by_key[key])
        text = f"{before}\n{context(prompt.units)}\n{after}"
        return self.sample(cell, (text,), (answers,), prefix, queries=queries)

    def _context(
        self,
        cell: Cell,
        request: TaskRequest,
        needles: list[str],
        distractors: list[str],
        distractor: Callable[[], str],
    ) -> Callable[[int], str]:
        """The haystack with the needles, by its number of units; draws the `distractors` that it needs."""
        rng = cell.random("positions")
        if self.variant.haystack == "essay":
            depths = sorted(rng.sample(_DEPTHS, len(needles)))
            haystack = haystack_of(request)

            def among_sentences(units: int) -> str:
                sentences = haystack.take(units)
                return haystack.separator.join(
                    insert(sentences, needles, [int(len(sentences) * depth / 100) for depth in depths])
                )

            return among_sentences

        shares = sorted(rng.random() for _ in needles)

        def among_lines(units: int) -> str:
            if self.variant.haystack == "noise":
                lines = noise_lines(units)
            else:
                distractors.extend(distractor() for _ in range(units - len(distractors)))
                lines = distractors[:units]
            return "\n".join(insert(lines, needles, [int(share * len(lines)) for share in shares]))

        return among_lines

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """The share of the values that occur in the answer."""
        return Score(string_match_all(predictions[0], sample.answers[0]))


def noise_lines(sentences: int) -> list[str]:
    """RULER's noise with its five sentences on each line; the last line may be shorter."""
    text = Haystack.noise().take(sentences)
    return [" ".join(text[at : at + _SENTENCES_PER_LINE]) for at in range(0, len(text), _SENTENCES_PER_LINE)]


VARIANTS = {
    "niah_single_1": ("a number for a word, hidden in noise", Variant("noise")),
    "niah_single_2": ("a number for a word, hidden in an essay", Variant("essay")),
    "niah_single_3": ("a UUID for a word, hidden in an essay", Variant("essay", value_type="uuids")),
    "niah_multikey_1": ("a number for one of four words, in an essay", Variant("essay", keys=4)),
    "niah_multikey_2": ("a number for one word among nothing but such needles", Variant("needle")),
    "niah_multikey_3": (
        "a UUID for one UUID among nothing but such needles",
        Variant("needle", key_type="uuids", value_type="uuids"),
    ),
    "niah_multivalue": ("all four numbers for one word, in an essay", Variant("essay", values=4)),
    "niah_multiquery": ("the numbers for four words, in an essay", Variant("essay", keys=4, queries=4)),
}

for _name, (_meaning, _variant) in VARIANTS.items():
    register(RulerNiah(_name, _meaning, _variant))
