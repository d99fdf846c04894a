"""RULER's common words: the ten most frequent words of a long list (Hsieh et al., 2024, section 3.3)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.scorers import string_match_all
from hetero_kv.evals.tasks.drawing import Cell, Different, english_words, word_pair
from hetero_kv.evals.tasks.generated import GeneratedTask
from hetero_kv.evals.tasks.registry import TaskRequest, register

COMMON = 10
MAX_NEW_TOKENS = 120
PREFIX = f" Answer: The top {COMMON} words that appear most often in the list are:"
# RULER's frequencies of common and uncommon words, those of its example, and the example's number of words: for 4,096
# tokens or more, and for fewer.
_LONG, _SHORT = ((30, 3), (10, 3), 40), ((6, 1), (3, 1), 20)


class CommonWords(GeneratedTask):
    """Ten common words among uncommon ones, after one worked example; the score is the share of the ten.

    If a list needs more uncommon words than the vocabulary has, they are pairs of an adjective and a noun (RULER uses a
    larger word list for that).
    """

    name = "ruler/cwe"
    meaning = f"the {COMMON} words that a long list holds most often"
    max_new_tokens = MAX_NEW_TOKENS

    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell; `metadata` has the frequencies of common and uncommon words."""
        frequencies, example_frequencies, example_words = _LONG if cell.length >= 4096 else _SHORT
        rng = cell.random("words")
        shuffled = rng.sample(english_words(), len(english_words()))
        # The list has none of the example's words: the example must neither answer nor mislead.
        example_list, words = shuffled[:example_words], shuffled[example_words:]
        pairs = Different(lambda: word_pair(rng))
        example = _question(_listed(example_list, example_frequencies, cell.random("example")))
        answered = f"{example}{PREFIX} {_numbered(example_list[:COMMON])}\n"
        order = cell.random("order").getrandbits(64)

        def build(uncommon: int) -> str:
            while len(words) < COMMON + uncommon:
                words.append(pairs.next())
            return answered + _question(_listed(words[: COMMON + uncommon], frequencies, random.Random(order)))

        prompt = self.fitted(cell, request, build, PREFIX)
        common, uncommon = frequencies
        return self.sample(cell, (prompt.text,), (tuple(words[:COMMON]),), PREFIX, common=common, uncommon=uncommon)

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """The share of the common words that occur in the answer."""
        return Score(string_match_all(predictions[0], sample.answers[0]))


def _listed(words: Sequence[str], frequencies: tuple[int, int], rng: random.Random) -> str:
    """The first `COMMON` words and the others, each with its frequency, shuffled and numbered."""
    common, uncommon = frequencies
    entries = [*words[:COMMON]] * common + [*words[COMMON:]] * uncommon
    rng.shuffle(entries)
    return _numbered(entries)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _question(word_list: str) -> str:
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        f"Memorize the ones that appear most often.\n{word_list}\n"
        f"Question: What are the {COMMON} most common words in the above list?"
    )


register(CommonWords())
