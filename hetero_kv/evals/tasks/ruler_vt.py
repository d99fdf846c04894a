"""RULER's variable tracking: which variables get a value (Hsieh et al., 2024, section 3.2)."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from itertools import pairwise

from hetero_kv.evals.haystack import insert
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.scorers import string_match_all
from hetero_kv.evals.tasks.drawing import Cell, Different, number
from hetero_kv.evals.tasks.fitting import fit
from hetero_kv.evals.tasks.generated import GeneratedTask
from hetero_kv.evals.tasks.registry import TaskRequest, register
from hetero_kv.evals.tasks.ruler_niah import noise_lines

HOPS = 4
MAX_NEW_TOKENS = 30
_EXAMPLE_TOKENS = 500
_NAME_LETTERS, _EXAMPLE_NAME_LETTERS = 5, 3


class VariableTracking(GeneratedTask):
    """One chain of `HOPS` assignments in noise, after one worked example; the score is the share of its variables.

    The example takes at most `_EXAMPLE_TOKENS` as in RULER, and at most a quarter of a short prompt.
    """

    name = "ruler/vt"
    meaning = f"the {HOPS + 1} variables of one chain of assignments hidden in noise"
    max_new_tokens = MAX_NEW_TOKENS

    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell; `metadata` has the chain's value."""
        rng = cell.random("values")
        values = Different(lambda: number(rng, digits=5))
        names, value = _names(cell.random("names"), _NAME_LETTERS), values.next()
        build, prefix = _problem(names, value, cell.random("positions"))

        example_names, example_value = _names(cell.random("example names"), _EXAMPLE_NAME_LETTERS), values.next()
        build_example, example_prefix = _problem(example_names, example_value, cell.random("example positions"))

        def example(lines: int) -> str:
            return f"{build_example(lines)}{example_prefix}{' '.join(example_names)}"

        most = min(_EXAMPLE_TOKENS, max(cell.length // 4, request.count_tokens(example(1))))
        shown = fit(example, request.count_tokens, most, self.name).text

        prompt = self.fitted(cell, request, lambda lines: f"{shown}\n\n{build(lines)}", prefix)
        return self.sample(cell, (prompt.text,), (tuple(names),), prefix, value=value)

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """The share of the chain's variables that occur in the answer."""
        return Score(string_match_all(predictions[0], sample.answers[0]))


def _names(rng: random.Random, letters: int) -> list[str]:
    return Different(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters))).take(HOPS + 1)


def _problem(names: Sequence[str], value: str, rng: random.Random) -> tuple[Callable[[int], str], str]:
    """The question as a function of its number of noise sentences, and the answer's prefix."""
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {to} = VAR {source}" for source, to in pairwise(names)]
    shares = sorted(rng.random() for _ in chain)

    def build(sentences: int) -> str:
        lines = noise_lines(sentences)
        text = "\n".join(insert(lines, chain, [int(share * len(lines)) for share in shares]))
        return (
            f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}\n"
            f"Question: Find all variables that are assigned the value {value} in the text above."
        )

    prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are: "
    )
    return build, prefix


register(VariableTracking())
