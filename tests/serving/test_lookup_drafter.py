"""Guesses from what was said before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.serving.speculation.draft_length import StepCosts, draft_lengths
from hetero_kv.serving.speculation.lookup_drafter import GRAMS, LONGEST, LookupDrafter

FEW_WORDS = st.lists(st.integers(0, 3), max_size=60)


def longest_common_end(tokens):
    """The longest end of the tokens that occurs before, too, as (its length, the last place behind it)."""
    found = (0, 0)
    for place in range(1, len(tokens)):
        common = 0
        while common < min(place, LONGEST) and tokens[place - 1 - common] == tokens[-1 - common]:
            common += 1
        found = max(found, (common, place))
    return found


@settings(max_examples=60, deadline=None)
@given(prompt=FEW_WORDS, answer=FEW_WORDS)
def test_a_sequence_goes_on_as_behind_its_end_earlier(prompt, answer):
    drafter, whole = LookupDrafter(prompt), LookupDrafter([*prompt, *answer])
    for token in answer:
        drafter.add(token)
    tokens = [*prompt, *answer]
    for each in (drafter, whole):
        odds = each.odds(5)
        common, _ = longest_common_end(tokens)
        assert bool(odds) == (common >= min(GRAMS))
        assert all(0 < chance < 1 for chance in odds)
        if odds:
            guesses = each.guesses(5)
            # What is guessed follows the newest two tokens somewhere before.
            text = [*tokens, *guesses]
            end = len(tokens)
            assert any(text[end - 2 : end + 1] == text[place - 2 : place + 1] for place in range(2, end))


def test_the_longest_common_end_counts_and_then_the_last_place():
    assert LookupDrafter([1, 2, 3, 7, 9, 2, 3, 8, 0, 1, 2, 3]).guesses(1) == [7]
    assert LookupDrafter([2, 3, 7, 9, 2, 3, 8, 0, 2, 3]).guesses(2) == [8, 0]


def test_text_that_repeats_itself_goes_on_so():
    assert LookupDrafter([5, 6, 5, 6, 5, 6]).guesses(5) == [5, 6, 5, 6, 5]


def test_wrong_guesses_make_later_ones_unlikely_and_right_ones_likely():
    quoted = list(range(100, 200))
    right, wrong = LookupDrafter(quoted), LookupDrafter([1, 2, 3] * 3 + quoted)
    for drafter in (right, wrong):
        drafter.add(100)
        drafter.add(101)
    before = right.odds(1)[0]
    for token in quoted[2:60]:
        right.add(token)
    for index in range(40):
        for token in (100 + index, 101 + index, 500 + index):
            wrong.add(token)
    wrong.add(100)
    wrong.add(101)
    assert right.odds(1)[0] > 0.9 > before > wrong.odds(1)[0]


def costs_of(seconds):
    costs = StepCosts()
    for rows, each in seconds.items():
        # The first step of a kind may take long.
        for taken in (50.0, each, each):
            costs.took(rows, taken)
    return costs


def test_likely_guesses_are_verified_where_rows_are_cheap_and_none_where_they_are_not():
    flat, steep = costs_of({1: 1.0, 8: 1.05}), costs_of({1: 1.0, 2: 2.0, 8: 8.0})
    odds = [[0.9] * 7]
    assert draft_lengths(flat, odds, [0.0]) == [7]
    assert draft_lengths(steep, odds, [0.0]) == [0]
    assert draft_lengths(flat, [[0.01] * 7], [0.0]) == [0]
    # Guesses that take as long as a step.
    assert draft_lengths(flat, odds, [1.0]) == [0]


def test_of_several_sequences_the_likeliest_guesses_are_verified():
    knee = costs_of({2: 1.0, 4: 1.01, 5: 3.0})
    assert draft_lengths(knee, [[0.9, 0.9], [0.2, 0.1]], [0.0, 0.0]) == [2, 0]
    assert draft_lengths(knee, [[], []], [0.0, 0.0]) == [0, 0]
    assert draft_lengths(StepCosts(), [[0.9]], [0.0]) == [0]
