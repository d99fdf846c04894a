"""InfiniteBench's scores, as its `compute_scores.py` defines them: (answer, expected answers) -> 0..1."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hetero_kv.evals import scorers

Scorer = Callable[[str, Sequence[str]], float]

_CUES = ("answer is:", "answer:", "correct option is:", "answer is", "option is", "is:")


def first_number(prediction: str, expected: Sequence[str]) -> float:
    """1 if the answer's first run of digits is the expected one."""
    return float(scorers.first_integer(prediction) == expected[0])


def word(prediction: str, expected: Sequence[str]) -> float:
    """1 if the expected value is one of the answer's words, ignoring punctuation."""
    return float(expected[0] in re.sub(r"[\n:\"'.,?!{}]", " ", prediction).split())


def any_name(prediction: str, expected: Sequence[str]) -> float:
    """1 if one of the names occurs in the answer, ignoring case."""
    return scorers.string_match_part(prediction, expected)


def qa_f1(prediction: str, expected: Sequence[str]) -> float:
    """The best F1 over words."""
    return max(scorers.qa_f1(prediction, one) for one in expected)


def qa_f1_characters(prediction: str, expected: Sequence[str]) -> float:
    """The best F1 over the characters of the normalised Chinese texts."""
    characters = list(scorers.normalized_chinese(prediction))
    return max(scorers.f1(characters, list(scorers.normalized_chinese(one))) for one in expected)


def rouge_l_sum(prediction: str, expected: Sequence[str]) -> float:
    """The best ROUGE-Lsum F, with each line as a sentence. Raises HeteroKVError without the `eval` extra."""
    rouge_scorer = scorers.optional_library("rouge_score.rouge_scorer", needed_for="ROUGE-Lsum")
    scorer = rouge_scorer.RougeScorer(["rougeLsum"])
    return max(scorer.score(one, prediction)["rougeLsum"].fmeasure for one in expected)


def first_value(prediction: str, expected: Sequence[str]) -> float:
    """1 if the answer's first number of the expected form, integer or fraction, equals the expected one."""
    found = re.search(r"\d+\.\d+" if "." in expected[0] else r"\d+", prediction)
    return float(found is not None and float(found[0]) == float(expected[0]))


def last_integer(prediction: str, expected: Sequence[str]) -> float:
    """1 if the answer's last word is the expected integer."""
    words = re.sub(r"[\n.`'\":]", " ", prediction).split()
    return float(
        bool(words) and re.fullmatch(r"[-+]?\d+", words[-1]) is not None and int(words[-1]) == int(expected[0])
    )


def leading_values(prediction: str, expected: Sequence[str]) -> float:
    """The share of the expected values that the answer contains before its first mistake."""
    right = 0
    for found, value in zip(re.findall(r"[0-9]+", prediction), expected, strict=False):
        if int(found) != int(value):
            break
        right += 1
    return right / len(expected)


def choice(prediction: str, expected: Sequence[str]) -> float:
    """1 if the answer names the right option or its letter; `expected` is the option and its letter.

    The last letter that stands alone counts, then the answer's beginning, then the text after a cue like "answer is:".
    """
    option, letter = expected[0], expected[1]
    text = prediction.strip()
    alone = re.search(r"\b[A-D]\b(?!.*\b[A-D]\b)", text)
    if alone is not None and alone[0] == letter:
        return 1.0
    if text[:1] in ("A", "B", "C", "D") and not text.startswith(option):
        return float(text[0] == letter)
    if text.startswith(option):
        return 1.0
    spaced = " ".join(re.sub(r"[\n\"'`*,?!{}-]", " ", text).split())
    for cue in _CUES:
        _, found, after = spaced.partition(cue)
        if found:
            return float(after.lstrip().startswith((letter, option)))
    return 0.0
