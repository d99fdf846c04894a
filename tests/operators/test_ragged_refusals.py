"""Refused masks of a batch: right padding, or a past that differs from the stored one."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import HeteroKVError
from tests.operators.ragged_prompts import PROMPTS
from tests.support.ragged_rows import Batch, alone, assert_same_but_for_rounding, prompt, together
from tests.support.slow_variants import with_few
from tests.support.small_recipes import injected, new_cache, small_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


# Settings, their name in the refusal, and the mask [2, 8] of a first turn.
REFUSED_AT_FIRST = {
    "padding on the right": (r"(right|left)", [[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8]),
    "holes": (r"(hole|middle|inside|between|within)", [[1, 1, 0, 1, 1, 1, 1, 1], [1] * 8]),
    "holes behind padding": (r"(hole|middle|inside|between|within)", [[0, 0, 1, 1, 0, 0, 1, 1], [1] * 8]),
    "too few columns": (r"(column|long|cover|shape|wide)", [[1] * 7, [1] * 7]),
    "too many columns": (r"(column|long|cover|shape|wide)", [[1] * 9, [1] * 9]),
    "another number of rows": (r"(row|sequence|shape)", [[1] * 8] * 3),
    "four dimensions": (r"(\b4|four|dim|shape)", [[[[True] * 8] * 8]] * 2),
}


@pytest.mark.parametrize("recipe", with_few(["ktransformers", "tova"], 1))
@pytest.mark.parametrize("case", REFUSED_AT_FIRST)
def test_masks_that_are_no_padding_on_the_left_are_refused_and_nothing_is_stored(case, recipe, model_of):
    named, mask = REFUSED_AT_FIRST[case]
    model = model_of()
    cache = injected(model, small_recipe(recipe))
    with pytest.raises(HeteroKVError, match=r"(?is)mask.*" + named), torch.no_grad():
        model(torch.stack([prompt(8, 1)] * 2), attention_mask=torch.tensor(mask), past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert_same_but_for_rounding(together(model, cache, PROMPTS[:2])[1], alone(model, new_cache(model), (PROMPTS[1],)))


# What is stored: [[0, 0, 1, 1], [1, 1, 1, 1]]; three columns come.
REFUSED_LATER = {
    "the past is another": (r"(stored|past|hold|cache)", [[0, 1, 1, 1, 1, 1, 1], [1] * 7]),
    "the past is hidden": (r"(stored|past|hold|cache)", [[0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]),
    "the past is left out": (r"(column|long|cover|shape|wide)", [[0, 1, 1], [1, 1, 1]]),
    "padding on the right": (r"(right|left)", [[0, 0, 1, 1, 1, 1, 0], [1] * 7]),
    "holes": (r"(hole|middle|inside|between|within)", [[0, 0, 1, 1, 1, 0, 1], [1] * 7]),
}


@pytest.mark.parametrize("case", REFUSED_LATER)
def test_masks_that_contradict_stored_tokens_are_refused_and_nothing_changes(case, model_of):
    named, mask = REFUSED_LATER[case]
    model = model_of()
    rows, more = [prompt(2, 1), prompt(4, 2)], [prompt(2, 3), prompt(3, 4)]
    batch = Batch(model, injected(model, small_recipe("ktransformers")), rows)
    with pytest.raises(HeteroKVError, match=r"(?is)mask.*" + named), torch.no_grad():
        model(torch.stack([prompt(3, 5)] * 2), attention_mask=torch.tensor(mask), past_key_values=batch.cache)
    assert batch.cache.lengths == [2, 4]
    assert batch.cache.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    batch.say(more)
    for logits, parts in zip(batch.logits, zip(rows, more, strict=True), strict=True):
        assert_same_but_for_rounding(logits, alone(model, new_cache(model), parts))


def test_a_full_cache_names_the_row_that_is_too_long_and_nothing_is_stored(model_of):
    model = model_of()
    injected(model, small_recipe("ktransformers"))
    batch = Batch(model, HeteroCache(model, 60), [prompt(20, 1), prompt(58, 2), prompt(20, 3)])
    with pytest.raises(CacheFullError, match="full in row 1: max_seq_len is 60 tokens, 58 are stored, and 3 more"):
        batch.say([prompt(3, seed) for seed in range(3)])
    assert batch.cache.lengths == [20, 58, 20]
    with pytest.raises(CacheFullError, match="full in row 1"):
        batch.say([prompt(2, 4), prompt(3, 5), prompt(5, 6)])
    batch.say([prompt(2, 4), prompt(2, 5), prompt(5, 6)])
    assert batch.cache.lengths == [22, 60, 25]
