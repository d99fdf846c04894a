"""ShadowKV's refusals name the setting and what fits; its recipes are the paper's."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.bridge import UnsupportedModelError
from hetero_kv.errors import HeteroKVError
from tests.operators.shadowkv_models import (
    injected,
    logits,
    random_tokens,
)
from tests.support.tiny_models import tiny_model


def test_a_model_whose_rotation_is_unknown_is_refused_by_name(llama, monkeypatch):
    cache = injected(llama)
    attention = llama.model.layers[1].self_attn.wrapped
    forward = type(attention).forward

    def reflected(self, *args, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return forward(self, *args, position_embeddings=(cos, -sin), **kwargs)

    monkeypatch.setattr(attention, "forward", reflected.__get__(attention))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn \(LlamaAttention\) rotates its keys"):
        logits(llama, cache, random_tokens(90))
    assert cache.get_seq_length() == 0


def test_sequences_at_different_positions_are_refused(llama):
    cache = injected(llama)
    positions = torch.stack([torch.arange(40), torch.arange(1, 41)])
    with pytest.raises(HeteroKVError, match="different positions"), torch.no_grad():
        llama(random_tokens(40, batch=2), position_ids=positions, past_key_values=cache)


def test_a_rank_above_the_models_channels_says_what_fits(llama):
    with pytest.raises(
        HeteroKVError, match=r"rank is 33, .* 2 kv heads of 16, 32 channels .* to auto, or to at most 32 "
    ):
        injected(llama, rank=33)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparse_budget": 3}, "sparse_budget is 3; it is less than one chunk of landmark_chunk_size 4 tokens"),
        ({"sparse_budget": 1.5}, "sparse_budget is 1.5; as a share of the sequence .* at most 1.0"),
        ({"sparse_budget": 0.0}, "sparse_budget is 0.0; as a share of the sequence it must be above 0"),
        ({"rank": 0}, "rank is 0; it must be a whole number of at least 1"),
        ({"local_chunks": 0}, "local_chunks is 0; it must be a whole number of at least 1"),
        ({"refactor_above": 2}, "refactor_above is 2; it must be a number from 0 to 1"),
        ({"value_type": "FP61"}, "value_type is 'FP61'"),
    ],
)
def test_settings_that_cannot_be_are_refused(llama, settings, message):
    with pytest.raises(HeteroKVError, match=message):
        injected(llama, **settings)


@pytest.mark.parametrize(("recipe", "plus"), [("shadowkv", False), ("shadowkv_plus", True)])
def test_the_recipes_have_the_papers_settings(recipe, plus):
    model = tiny_model("llama", max_position_embeddings=1024)
    inject(model, recipe, command_line={"max_seq_len": 900})
    settings = [operator.settings for operator in model.hetero_kv_injection.attention_operators()]
    paper = {"rank": "auto", "landmark_chunk_size": 8, "outlier_chunks": 48, "local_chunks": 4, "sparse_budget": 0.0156}
    assert {name: getattr(settings[0], name) for name in paper} == paper
    assert settings[0].sized(1024).rank == 160
    assert all(setting.project_generated is plus for setting in settings)
    cache = HeteroCache(model)
    logits(model, cache, random_tokens(600), *random_tokens(12, 1).split(1, dim=1))
    # 612 tokens are 76 chunks, 4 of them local; one in 64 is chosen.
    assert cache.layers[0].chunks == (72 if plus else 71)
    assert cache.layers[0].context.outliers.ids.shape[2] == 48
    assert cache.layers[0].context.outliers.residents.ids.shape[2] == 2
