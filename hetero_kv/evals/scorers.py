"""Scores of answers, as the benchmarks define them. Every score is from 0 to 1.

RULER (Hsieh et al., 2024): `string_match_all`, `string_match_part`. LongBench (Bai et al., 2023): `qa_f1`, `rouge_l`,
their Chinese forms, `edit_similarity`, `classification`, `count_score`, `retrieval_score`. Lost in the middle (Liu et
al., 2023): `contains`. Cascading KV cache, section 4.4: `digits_in_place`.
"""

from __future__ import annotations

import importlib
import re
import string
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hetero_kv.errors import HeteroKVError

# LongBench's list.
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"  # noqa: RUF001
    "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def optional_library(module: str, needed_for: str) -> Any:
    """A library of the `eval` extra. Raises HeteroKVError, naming the extra, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise HeteroKVError(
            f"{needed_for} need{'' if needed_for.endswith('s') else 's'} the library {module!r}, which is not "
            "installed; install the extra: pip install 'hetero-kv[eval]'"
        ) from error


def contains(prediction: str, expected: str) -> float:
    """1 if the expected text occurs in the answer, ignoring case."""
    return float(expected.lower() in prediction.lower())


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of the references that occur in the answer."""
    return sum(contains(prediction, reference) for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if one of the references occurs in the answer."""
    return max(contains(prediction, reference) for reference in references)


def first_integer(prediction: str) -> str:
    """The first run of digits in the answer, or ""."""
    found = re.search(r"[0-9]+", prediction)
    return found[0] if found else ""


def digits_in_place(prediction: str, expected: str) -> float:
    """The share of digits at the right place in the answer's first number; random digits score 0.1."""
    return sum(a == b for a, b in zip(first_integer(prediction), expected, strict=False)) / len(expected)


def normalized(text: str) -> str:
    """Lower case, without punctuation and articles, with single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def normalized_chinese(text: str) -> str:
    """Lower case, without punctuation and white space."""
    return "".join(text.lower().translate(_ALL_PUNCTUATION).split())


def f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over tokens, as bags."""
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def qa_f1(prediction: str, expected: str) -> float:
    """F1 over the words of the normalised texts."""
    return f1(normalized(prediction).split(), normalized(expected).split())


def qa_f1_chinese(prediction: str, expected: str) -> float:
    """F1 over jieba's words. Raises HeteroKVError without the `eval` extra."""
    words = [
        [word for word in map(normalized_chinese, _chinese_words(text)) if word] for text in (prediction, expected)
    ]
    return f1(*words)


def rouge_l(prediction: str, expected: str) -> float:
    """ROUGE-L's F, summary level, from the library `rouge`. Raises HeteroKVError without the `eval` extra."""
    rouge = optional_library("rouge", needed_for="ROUGE-L")
    with _recursion_limit(1000 + 2 * (len(prediction.split()) + len(expected.split()))):
        try:
            return rouge.Rouge(metrics=["rouge-l"]).get_scores([prediction], [expected])[0]["rouge-l"]["f"]
        except ValueError:
            # A text without words.
            return 0.0


def rouge_l_chinese(prediction: str, expected: str) -> float:
    """ROUGE-L over jieba's words. Raises HeteroKVError without the `eval` extra."""
    return rouge_l(" ".join(_chinese_words(prediction)), " ".join(_chinese_words(expected)))


def edit_similarity(prediction: str, expected: str) -> float:
    """LongBench's code similarity: the first line that is code, compared with the expected line, in whole per cent.

    Raises:
        HeteroKVError: without the `eval` extra.
    """
    fuzz = optional_library("rapidfuzz.fuzz", needed_for="the edit similarity")
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(line, expected)) / 100 if line and expected else 0.0


def classification(prediction: str, expected: str, classes: Sequence[str]) -> float:
    """1/n if the right class is among the n classes that the answer names; otherwise 0.

    A class whose name is part of the right one's does not count as named.
    """
    named = [name for name in classes if name in prediction and (name == expected or name not in expected)]
    return 1 / len(named) if expected in named else 0.0


def count_score(prediction: str, expected: str) -> float:
    """The share of the answer's numbers that equal the expected one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(expected) / len(numbers) if numbers else 0.0


def retrieval_score(prediction: str, expected: str) -> float:
    """The share of the answer's numbers that equal the expected paragraph's ("Paragraph 12", "段落12").

    Raises:
        HeteroKVError: an expected text that names no paragraph.
    """
    paragraph = re.search(r"(?:Paragraph |段落)(\d+)", expected)
    if paragraph is None:
        raise HeteroKVError(f"expected answer {expected!r}: it names no paragraph, as 'Paragraph 12' or '段落12' does")
    return count_score(prediction, paragraph[1])


def _chinese_words(text: str) -> list[str]:
    jieba = optional_library("jieba", needed_for="Chinese scores")
    jieba.setLogLevel("WARNING")
    return jieba.lcut(text)


@contextmanager
def _recursion_limit(depth: int) -> Iterator[None]:
    """Raise the recursion limit for `rouge`, which recurses once per word of a sentence pair."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, depth))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
