"""`generate` and other calls of a padded batch answer as each row alone."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject
from tests.operators.ragged_prompts import LENGTHS, PROMPTS, TURNS
from tests.support.ragged_rows import alone, assert_same_but_for_rounding, padded
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import injected, new_cache, small_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


def generated(model, token_ids, cache, mask=None, **kwargs):
    """What `model.generate` answers, greedily, or by beams where `kwargs` ask for them."""
    mask = torch.ones_like(token_ids) if mask is None else mask
    return model.generate(
        token_ids, attention_mask=mask, past_key_values=cache, do_sample=False, pad_token_id=5, **kwargs
    )


FAMILIES = {
    "retrieval": ("llama", "ktransformers"),
    "preselection": ("llama", "kvretrieval"),
    "quest": ("llama", "quest"),
    "shadowkv": ("llama", "shadowkv"),
    "shadowkv plus": ("llama", "shadowkv_plus"),
    "entries": ("llama", "h2o"),
    "entries in strides": ("llama", "streaming_llm"),
    "a catalyst": ("llama", "infinipot"),
    "windows": ("gemma3_text", "ktransformers"),
}


@pytest.mark.parametrize(
    "family",
    with_slow(list(FAMILIES), slow=FAMILIES.keys() - {"entries"}),
)
def test_generate_answers_a_padded_batch_as_it_answers_each_alone_in_two_turns(family, model_of):
    architecture, recipe = FAMILIES[family]
    model = model_of(architecture)
    cache = injected(model, small_recipe(recipe))
    token_ids, mask = padded(PROMPTS[:4])
    first = generated(model, token_ids, cache, mask, max_new_tokens=12)
    # The last token of an answer is not stored yet: it comes with the second turn, and padding before it.
    stored = cache.get_seq_length()
    turns, turn_mask = padded([torch.cat([row[stored:], turn]) for row, turn in zip(first, TURNS, strict=False)])
    again = torch.cat([first[:, :stored], turns], dim=1)
    again_mask = torch.cat([cache.attention_mask, turn_mask], dim=1)
    second = generated(model, again, cache, again_mask, max_new_tokens=8)
    for row, (start, turn) in enumerate(zip(PROMPTS[:4], TURNS, strict=False)):
        own = new_cache(model)
        answer = generated(model, start[None], own, max_new_tokens=12)
        assert first[row, -12:].tolist() == answer[0, -12:].tolist()
        answer = torch.cat([answer, turn[None]], dim=1)
        expected = generated(model, answer, own, max_new_tokens=8)
        assert second[row, -8:].tolist() == expected[0, -8:].tolist()


@pytest.mark.parametrize(
    "recipe", with_slow(["ktransformers", "shadowkv_plus", "tova"], slow=["shadowkv_plus", "tova"])
)
def test_beams_of_a_padded_batch_are_those_of_each_prompt_alone(recipe, model_of):
    model = model_of()
    beams = {"max_new_tokens": 10, "num_beams": 3, "num_return_sequences": 3}
    token_ids, mask = padded(PROMPTS[1:3])
    cache = injected(model, small_recipe(recipe))
    found = generated(model, token_ids, cache, mask, **beams)
    assert cache.lengths == [*[LENGTHS[1] + 9] * 3, *[LENGTHS[2] + 9] * 3]
    for row, start in enumerate(PROMPTS[1:3]):
        expected = generated(model, start[None], new_cache(model), **beams)
        assert found[3 * row : 3 * row + 3, -10:].tolist() == expected[:, -10:].tolist()


def test_explicit_positions_are_used(model_of):
    model = model_of()
    token_ids, mask = padded(PROMPTS[:3])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    answers = []
    for kwargs in ({}, {"position_ids": positions}):
        cache = injected(model, small_recipe("ktransformers"))
        with torch.no_grad():
            answers.append(model(token_ids, attention_mask=mask, past_key_values=cache, **kwargs).logits)
        eject(model)
    assert answers[0][mask.bool()].equal(answers[1][mask.bool()])


def test_embeddings_of_a_padded_batch_are_taken(model_of):
    model = model_of()
    token_ids, mask = padded(PROMPTS[:3])
    cache = injected(model, small_recipe("tova"))
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(token_ids)
        logits = model(inputs_embeds=embeddings, attention_mask=mask, past_key_values=cache).logits
    for row, start in zip(logits, PROMPTS, strict=False):
        assert_same_but_for_rounding(row[-len(start) :], alone(model, new_cache(model), (start,)))
