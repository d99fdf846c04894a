"""Needle in a haystack: a number hidden at a depth of a long text.

Kamradt, 2023, in a form that other needles can repeat and that needs no judge for scoring (Dhinakaran, 2024; Gemini
1.5, section 5.2.1.2): "The special magic {city} number is: {number}".
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_kv.evals.haystack import insert, position_at
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.scorers import contains
from hetero_kv.evals.tasks.drawing import Cell, number
from hetero_kv.evals.tasks.generated import GeneratedTask, haystack_of
from hetero_kv.evals.tasks.registry import TaskRequest, register

NEEDLE = "The special magic {city} number is: {number}."
QUESTION = "What is the special magic {city} number?"
MANNER = "Don't give information outside the document or repeat your findings. Keep your response short and direct."

# No city's name contains another's, so that a needle answers one question only.
CITIES = (
    "Amsterdam", "Athens", "Auckland", "Bangkok", "Barcelona", "Beirut", "Berlin", "Bogota", "Brussels", "Bucharest",
    "Budapest", "Cairo", "Casablanca", "Chicago", "Copenhagen", "Dakar", "Dublin", "Edinburgh", "Geneva", "Hanoi",
    "Havana", "Helsinki", "Istanbul", "Jakarta", "Johannesburg", "Karachi", "Khartoum", "Kinshasa", "Lagos", "Lima",
    "Lisbon", "London", "Madrid", "Manila", "Melbourne", "Montreal", "Mumbai", "Nairobi", "Oslo", "Paris", "Prague",
    "Reykjavik", "Santiago", "Seattle", "Seoul", "Singapore", "Stockholm", "Sydney", "Toronto", "Vienna", "Warsaw",
    "Yerevan",
)  # fmt: skip


class Needle(GeneratedTask):
    """One needle; scored 1 if its number occurs in the answer."""

    name = "needle"
    meaning = "a city's magic number, hidden at a depth of a long text"
    uses_depth = True
    uses_haystack = True
    max_new_tokens = 32

    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell; `metadata` has the needle."""
        rng = cell.random("needle")
        city, value = rng.choice(CITIES), number(rng)
        needle = NEEDLE.format(city=city, number=value)
        haystack = haystack_of(request)
        assert cell.depth is not None
        depth = cell.depth

        def build(units: int) -> str:
            sentences = haystack.take(units)
            text = haystack.separator.join(insert(sentences, [needle], [position_at(sentences, depth)]))
            return f"{text}\n\n{QUESTION.format(city=city)} {MANNER}"

        prompt = self.fitted(cell, request, build)
        return self.sample(cell, (prompt.text,), ((value,),), needle=needle, haystack=haystack.name)

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """Whether the number occurs in the answer."""
        return Score(contains(predictions[0], sample.answers[0][0]))


register(Needle())
