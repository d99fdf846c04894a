"""RULER's frequent words: the three most frequent words of a coded text (Hsieh et al., 2024, section 3.3)."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence

from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.scorers import string_match_all
from hetero_kv.evals.tasks.drawing import Cell, Different
from hetero_kv.evals.tasks.generated import GeneratedTask
from hetero_kv.evals.tasks.registry import TaskRequest, register

MAX_NEW_TOKENS = 50
PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
REQUESTED = 3
NOISE = "..."
_LETTERS = 6
_TOKENS_PER_WORD_OF_VOCABULARY = 50
_ZETA_2 = math.pi**2 / 6
# With fewer words the third and the fourth most frequent could be equally frequent.
_LEAST_DRAWN = 100


class FrequentWords(GeneratedTask):
    """Words of six letters whose frequencies follow a zeta distribution (α = 2); the most frequent is noise, "...".

    The score is the share of the next three words in the answer.
    """

    name = "ruler/fwe"
    meaning = "the three most frequent words of a coded text"
    max_new_tokens = MAX_NEW_TOKENS

    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell."""
        rng = cell.random("vocabulary")
        coded = Different(lambda: "".join(rng.choices(string.ascii_lowercase, k=_LETTERS)))
        vocabulary = [NOISE, *coded.take(max(cell.length // _TOKENS_PER_WORD_OF_VOCABULARY, REQUESTED + 1))]
        order = cell.random("order").getrandbits(64)

        def build(drawn: int) -> str:
            words = [word for rank, word in enumerate(vocabulary, start=1) for _ in range(frequency(rank, drawn))]
            random.Random(order).shuffle(words)
            return (
                "Read the following coded text and track the frequency of each coded word. "
                f"Find the three most frequently appeared coded words. {' '.join(words)}\n"
                "Question: Do not provide any explanation. Please ignore the dots '....'. "
                "What are the three most frequently appeared words in the above coded text?"
            )

        prompt = self.fitted(cell, request, build, PREFIX, least=_LEAST_DRAWN)
        return self.sample(cell, (prompt.text,), (tuple(vocabulary[1 : 1 + REQUESTED]),), PREFIX, drawn=prompt.units)

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """The share of the three words that occur in the answer."""
        return Score(string_match_all(predictions[0], sample.answers[0]))


def frequency(rank: int, drawn: int) -> int:
    """The frequency of the word of a rank (from 1) among `drawn` words: zeta distribution with α = 2."""
    return int(drawn / (_ZETA_2 * rank**2))


register(FrequentWords())
