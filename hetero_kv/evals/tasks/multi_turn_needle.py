"""Multi-turn needle in a haystack: several needles, and each turn queries another one.

ShadowKV, section 5.2 and figure 7: a method that keeps only tokens for the first question loses those of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_kv.evals.haystack import insert, position_at
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.scorers import contains
from hetero_kv.evals.tasks.drawing import Cell, Different, number
from hetero_kv.evals.tasks.generated import GeneratedTask, haystack_of
from hetero_kv.evals.tasks.needle import CITIES, MANNER, NEEDLE, QUESTION
from hetero_kv.evals.tasks.registry import TaskRequest, register

TURNS = 4


class MultiTurnNeedle(GeneratedTask):
    """`TURNS` needles, one in each equal part of the text, queried in random order; the score is the turns' mean.

    The length is that of the first turn, which contains the text.
    """

    name = "multi_turn_needle"
    meaning = f"{TURNS} needles in one text; each turn asks for another one"
    max_new_tokens = 32
    uses_haystack = True

    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell; `metadata` has the needles' depths in query order."""
        rng = cell.random("needles")
        cities = rng.sample(CITIES, TURNS)
        values = Different(lambda: number(rng)).take(TURNS)
        parts = rng.sample(range(TURNS), TURNS)
        depths = [100 * (part + rng.random()) / TURNS for part in parts]
        needles = [NEEDLE.format(city=city, number=value) for city, value in zip(cities, values, strict=True)]
        questions = [f"{QUESTION.format(city=city)} {MANNER}" for city in cities]
        haystack = haystack_of(request)

        def build(units: int) -> str:
            sentences = haystack.take(units)
            text = haystack.separator.join(
                insert(sentences, needles, [position_at(sentences, depth) for depth in depths])
            )
            return f"{text}\n\n{questions[0]}"

        prompt = self.fitted(cell, request, build)
        return self.sample(
            cell,
            (prompt.text, *questions[1:]),
            tuple((value,) for value in values),
            depths=depths,
            haystack=haystack.name,
        )

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """The share of turns whose number occurs in the turn's answer; `parts` has each turn's score."""
        turns = {
            f"turn_{turn}": contains(prediction, expected)
            for turn, (prediction, (expected,)) in enumerate(zip(predictions, sample.answers, strict=True), start=1)
        }
        return Score(sum(turns.values()) / len(turns), turns)


register(MultiTurnNeedle())
