# ruff: noqa: RUF001
"""Scorers against the benchmarks' definitions and examples worked out by hand."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals import scorers
from hetero_kv.evals.formats import infinitebench_scores

TEXTS = st.text(alphabet="ab c.1A#\n", max_size=30)


@pytest.mark.parametrize(
    ("prediction", "references", "all_of", "part_of"),
    [
        (" 1234567, 7654321.", ["1234567", "7654321"], 1.0, 1.0),
        ("only 1234567", ["1234567", "7654321", "1111111", "2222222"], 0.25, 1.0),
        ("ALPHA", ["alpha"], 1.0, 1.0),
        ("alpha", ["Alpha Beta"], 0.0, 0.0),
        ("", ["x"], 0.0, 0.0),
    ],
)
def test_rulers_string_match_is_containment_of_all_or_of_one_whatever_the_case(prediction, references, all_of, part_of):
    assert scorers.string_match_all(prediction, references) == all_of
    assert scorers.string_match_part(prediction, references) == part_of


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=4))
def test_all_of_the_references_are_never_more_than_one_of_them(prediction, references):
    share = scorers.string_match_all(prediction, references)
    assert 0 <= share <= scorers.string_match_part(prediction, references) <= 1


@pytest.mark.parametrize(
    ("prediction", "digits"),
    [
        ("The key is 71432.", 1.0),
        ("71932", 0.8),
        ("7143", 0.8),
        ("1432", 0.0),
        ("714321", 1.0),
        ("none", 0.0),
        ("", 0.0),
    ],
)
def test_a_passkeys_digit_counts_only_in_its_place(prediction, digits):
    assert scorers.digits_in_place(prediction, "71432") == pytest.approx(digits)


def test_random_digits_score_a_tenth():
    guesses = [f"{guess:05d}" for guess in range(100_000)]
    assert sum(scorers.digits_in_place(guess, "71432") for guess in guesses) / len(guesses) == pytest.approx(0.1)


def test_longbenchs_normalisation_drops_case_punctuation_articles_and_spaces():
    assert scorers.normalized("  The Quick, (brown)  fox's an a-theory!") == "quick brown foxs atheory"
    assert scorers.normalized_chinese(" 你好， World！ ") == "你好world"


@pytest.mark.parametrize(
    ("prediction", "expected", "score"),
    [
        ("The Beatles", "beatles", 1.0),
        ("It was John Lennon of the Beatles", "John Lennon", 2 * (2 / 6) * 1 / (2 / 6 + 1)),
        ("a b b", "b b b", 2 * 1 * (2 / 3) / (1 + 2 / 3)),
        ("no", "yes", 0.0),
        ("", "yes", 0.0),
        ("the", "the", 0.0),
    ],
)
def test_f1_is_that_of_bags_of_normalised_words(prediction, expected, score):
    assert scorers.qa_f1(prediction, expected) == pytest.approx(score)


@given(TEXTS, TEXTS)
def test_f1_is_symmetric_and_one_for_itself(one, other):
    assert scorers.qa_f1(one, other) == pytest.approx(scorers.qa_f1(other, one))
    assert scorers.qa_f1(one, one) == (1 if scorers.normalized(one) else 0)


def test_chinese_f1_is_that_of_jiebas_words():
    assert scorers.qa_f1_chinese("我来到北京清华大学。", "我来到北京清华大学") == 1
    # 我 / 来到 / 北京 / 清华大学 against 北京 / 清华大学
    assert scorers.qa_f1_chinese("我来到北京清华大学", "北京清华大学") == pytest.approx(2 / 3)
    assert scorers.qa_f1_chinese("天气", "北京") == 0


@pytest.mark.parametrize(
    ("prediction", "expected", "score"),
    [
        ("police killed the gunman", "police killed the gunman", 1.0),
        # Lin, 2004, section 3.2: LCS of 3 and of 2 out of 4 words.
        ("police kill the gunman", "police killed the gunman", 0.75),
        ("the gunman kill police", "police killed the gunman", 0.5),
        ("", "police killed the gunman", 0.0),
        ("...", "police killed the gunman", 0.0),
    ],
)
def test_rouge_l_is_the_f_of_the_longest_common_subsequence(prediction, expected, score):
    assert scorers.rouge_l(prediction, expected) == pytest.approx(score, abs=1e-6)


def test_rouge_l_of_long_texts_without_full_stops_is_not_cut_off_by_recursion():
    words = [f"word{n}" for n in range(700)]
    before = sys.getrecursionlimit()
    assert scorers.rouge_l(" ".join(words), " ".join(words[::2])) == pytest.approx(2 / 3, abs=1e-6)
    assert sys.getrecursionlimit() == before


def test_chinese_rouge_l_is_that_of_jiebas_words():
    assert scorers.rouge_l_chinese("我来到北京", "我来到北京") == pytest.approx(1, abs=1e-6)
    assert scorers.rouge_l_chinese("我来到北京清华大学", "北京清华大学") == pytest.approx(2 / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("prediction", "expected", "score"),
    [
        ("\n    return total", "    return total", 1.0),
        ("```python\n# adds\n// adds\nreturn a\nreturn b", "return a", 1.0),
        # "abcd" and "bcde": 3 of 4 characters in common.
        ("abcd", "bcde", 0.75),
        # One of eleven characters too many: 95.2, counted in whole per cent.
        ("returntotal", "returntota", 0.95),
        ("xyz", "abc", 0.0),
        ("", "abc", 0.0),
        ("# only a comment", "abc", 0.0),
    ],
)
def test_edit_similarity_compares_the_first_line_of_code(prediction, expected, score):
    assert scorers.edit_similarity(prediction, expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "expected", "score"),
    [
        ("Type: City", "City", 1.0),
        ("City or Country", "City", 0.5),
        ("Other location", "Other location", 1.0),
        ("Country", "City", 0.0),
        ("nothing", "City", 0.0),
    ],
)
def test_classification_shares_the_point_among_the_classes_named(prediction, expected, score):
    classes = ["City", "Country", "location", "Other location"]
    assert scorers.classification(prediction, expected, classes) == score


@pytest.mark.parametrize(
    ("prediction", "expected", "score"),
    [("There are 12 of them", "12", 1.0), ("12, not 13", "12", 0.5), ("112", "12", 0.0), ("many", "12", 0.0)],
)
def test_a_counts_score_is_the_share_of_right_numbers(prediction, expected, score):
    assert scorers.count_score(prediction, expected) == score


def test_a_retrievals_score_is_the_share_of_numbers_that_are_the_paragraphs():
    assert scorers.retrieval_score("Paragraph 7", "Paragraph 7") == 1
    assert scorers.retrieval_score("Paragraph 7 or 8", "Paragraph 7") == 0.5
    assert scorers.retrieval_score("段落7", "段落7") == 1
    with pytest.raises(HeteroKVError, match="names no paragraph"):
        scorers.retrieval_score("7", "the seventh")


@pytest.mark.parametrize(
    ("score", "library"),
    [
        (lambda: scorers.rouge_l("a", "a"), "rouge"),
        (lambda: scorers.edit_similarity("a", "a"), "rapidfuzz.fuzz"),
        (lambda: scorers.qa_f1_chinese("a", "a"), "jieba"),
        (lambda: infinitebench_scores.rouge_l_sum("a", ["a"]), "rouge_score.rouge_scorer"),
    ],
)
def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch, score, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(HeteroKVError, match=library) as error:
        score()
    assert "pip install 'hetero-kv[eval]'" in str(error.value)


@pytest.mark.parametrize(
    ("score", "prediction", "expected", "value"),
    [
        ("first_number", "The key is 71432, or 11111", ["71432"], 1),
        ("first_number", "11111 or 71432", ["71432"], 0),
        ("word", '"3f-5": "ab-1",', ["ab-1"], 1),
        ("word", "ab-12", ["ab-1"], 0),
        ("any_name", "it is ACTOR_7", ["Actor_7", "Bob"], 1),
        ("any_name", "someone", ["BOB"], 0),
        ("qa_f1", "in the red house", ["a red house", "blue"], 2 * (2 / 3) / (2 / 3 + 1)),
        ("qa_f1_characters", "北京。", ["北京"], 1),
        ("qa_f1_characters", "南京", ["北京"], 0.5),
        ("rouge_l_sum", "a b\nc d", ["a b\nc d"], 1),
        ("rouge_l_sum", "x", ["a b"], 0),
        ("first_value", "it is 37.", ["37"], 1),
        ("first_value", "3.5 of 4", ["3.5"], 1),
        ("first_value", "none", ["37"], 0),
        ("last_integer", "the result: -42.", ["-42"], 1),
        ("last_integer", "-42 it is", ["-42"], 0),
        ("leading_values", "[1, 4, 9, 2]", ["1", "4", "8", "2"], 0.5),
        ("leading_values", "", ["1"], 0),
        ("choice", "B", ["the fox", "B"], 1),
        ("choice", "B. the fox", ["the fox", "B"], 1),
        ("choice", "the fox", ["the fox", "B"], 1),
        ("choice", "The answer is: B", ["the fox", "B"], 1),
        ("choice", "The answer is: the fox", ["the fox", "B"], 1),
        ("choice", "The answer is: C", ["the fox", "B"], 0),
        ("choice", "C, rather than B", ["the fox", "B"], 1),
        ("choice", "C", ["the fox", "B"], 0),
        ("choice", "", ["the fox", "B"], 0),
    ],
)
def test_infinitebenchs_scores_are_those_of_its_script(score, prediction, expected, value):
    assert getattr(infinitebench_scores, score)(prediction, expected) == pytest.approx(value)
