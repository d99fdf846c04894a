"""Unusual calls: inference mode, autocast, empty prompts."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import DynamicCache, LlamaForSequenceClassification

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.errors import UnsupportedModelError
from tests.support.slow_variants import with_few
from tests.support.small_recipes import injected, new_cache, small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = tiny_model("llama")
PROMPT, LATER = (torch.randint(2, 97, (2, n), generator=torch.Generator().manual_seed(n)) for n in (90, 24))


@pytest.fixture(autouse=True)
def ejected():
    yield
    if getattr(MODEL, "hetero_kv_injection", None) is not None:
        eject(MODEL)


def said(cache, *parts):
    with torch.no_grad():
        return torch.cat([MODEL(part, past_key_values=cache).logits for part in parts], dim=1)


@pytest.mark.parametrize(
    "recipe",
    with_few(["ktransformers", "shadowkv", "retroinfer", "dense", "infinipot"], quick=["ktransformers", "infinipot"]),
)
def test_a_cache_filled_in_inference_mode_continues_outside_of_it(recipe):
    cache, script = injected(MODEL, small_recipe(recipe)), (*LATER[:, :16].split(1, dim=1), LATER[:, 16:])
    with torch.inference_mode():
        MODEL(PROMPT, past_key_values=cache)
    found = said(cache, *script)
    other = new_cache(MODEL)
    said(other, PROMPT)
    assert torch.equal(found, said(other, *script))


@pytest.mark.parametrize("recipe", ["ktransformers", "dense", "shadowkv"])
def test_under_autocast_it_is_the_untouched_model_but_for_rounding(recipe):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = MODEL(PROMPT, past_key_values=DynamicCache(config=MODEL.config)).logits.float()
        cache = injected(MODEL, small_recipe(recipe))
        found = MODEL(PROMPT, past_key_values=cache).logits.float()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_forgetting_a_positive_number_of_tokens_is_refused():
    cache = injected(MODEL, small_recipe("dense"))
    said(cache, PROMPT)
    with pytest.raises(HeteroKVError, match=r"crop received 10; .* crop\(-10\) drops 10"):
        cache.crop(10)
    assert cache.lengths == [90, 90]


@pytest.mark.parametrize("ids", [PROMPT[:, :0], PROMPT[0]])
def test_input_ids_of_wrong_shape_are_refused_by_it(ids):
    cache = injected(MODEL, small_recipe("dense"))
    with pytest.raises(
        HeteroKVError, match=re.escape(f"called with token ids or embeddings of shape {list(ids.shape)}")
    ):
        said(cache, ids)
    assert cache.get_seq_length() == 0


def test_logits_that_are_not_of_tokens_are_refused_for_rows_of_several_lengths():
    model = LlamaForSequenceClassification(MODEL.config).eval()
    inject(model, small_recipe("dense"))
    mask = torch.ones_like(PROMPT)
    with torch.no_grad():
        assert model(PROMPT, past_key_values=HeteroCache(model)).logits.shape == (2, 2)
        mask[0, :7] = 0
        with pytest.raises(UnsupportedModelError, match=r"returns logits \[1, 2\] for rows of different lengths"):
            model(PROMPT, attention_mask=mask, past_key_values=HeteroCache(model))


def test_a_layer_with_another_layers_keys_and_values_is_refused_by_name():
    attention = MODEL.model.layers[2].self_attn
    attention.is_kv_shared_layer = True
    try:
        with pytest.raises(
            UnsupportedModelError, match=r"layers\.2\.self_attn .* it uses the keys and values of another layer"
        ):
            inject(MODEL, "dense")
    finally:
        del attention.is_kv_shared_layer
