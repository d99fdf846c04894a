"""Passkey retrieval: five digits in noise (Mohtashami and Jaggi, 2023; InfiniteBench's Retrieve.PassKey)."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_kv.evals.haystack import insert, position_at
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.scorers import digits_in_place, first_integer
from hetero_kv.evals.tasks.drawing import Cell, number
from hetero_kv.evals.tasks.generated import GeneratedTask, haystack_of
from hetero_kv.evals.tasks.registry import TaskRequest, register

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
ANSWER_PREFIX = "The pass key is"


class Passkey(GeneratedTask):
    """Scored 1 for the exact key; the part `digits` is the share of digits in place (Cascading KV cache, 4.4)."""

    name = "passkey"
    meaning = "five digits hidden in noise; exact, and per digit"
    uses_depth = True
    uses_haystack = True
    max_new_tokens = 16

    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell."""
        key = number(cell.random("key"), digits=5)
        haystack = haystack_of(request)
        assert cell.depth is not None
        depth = cell.depth

        def build(units: int) -> str:
            sentences = haystack.take(units)
            text = haystack.separator.join(
                insert(sentences, [PASSKEY.format(key=key)], [position_at(sentences, depth)])
            )
            return f"{TASK}\n{text}\n{QUESTION}"

        prompt = self.fitted(cell, request, build, ANSWER_PREFIX)
        return self.sample(cell, (prompt.text,), ((key,),), ANSWER_PREFIX, haystack=haystack.name)

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """Whether the answer's first number is the key, and the share of its digits that are right."""
        key = sample.answers[0][0]
        exact = float(first_integer(predictions[0]) == key)
        return Score(exact, {"exact": exact, "digits": digits_in_place(predictions[0], key)})


register(Passkey())
