"""The packaged recipes with their own settings, on the default model's shape."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_kv import eject, inject
from hetero_kv.planning.plan import Footprint
from tests.support.slow_variants import with_few, with_slow
from tests.support.small_recipes import RECIPES, new_cache
from tests.support.tiny_models import tiny_model

#: Qwen2.5-Coder-0.5B-Instruct: what of its shape attention, weights and positions depend on.
_DEFAULT_MODEL = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def default_shape():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **_DEFAULT_MODEL))


@pytest.fixture(scope="module")
def small():
    return tiny_model("qwen2")


@pytest.mark.parametrize(
    "recipe",
    with_few(
        RECIPES,
        quick=["adaptive", "dense", "infinipot", "minference", "quest", "retroinfer", "self_extend", "shadowkv"],
    ),
)
def test_every_recipe_fits_the_default_model_without_flags(default_shape, recipe):
    injection = inject(default_shape, recipe)
    try:
        memory = Footprint.of(injection).memory(32_768)
    finally:
        eject(default_shape)
    assert memory.store + memory.compute > 0


# Of recipes that differ in their kernels alone: others of the same kind have these too.
@pytest.mark.parametrize("recipe", with_slow(RECIPES, slow=["adaptive_lean", "snapkv"]))
def test_every_recipe_answers_without_flags(small, recipe):
    tokens = torch.randint(2, 97, (1, 300), generator=torch.Generator().manual_seed(0))
    inject(small, recipe)
    try:
        cache = new_cache(small, max_seq_len=400)
        with torch.no_grad():
            small(tokens, past_key_values=cache)
            logits = torch.cat([small(tokens[:, :1], past_key_values=cache).logits for _ in range(3)])
        assert cache.lengths == [303]
    finally:
        eject(small)
    assert bool(torch.isfinite(logits).all())
