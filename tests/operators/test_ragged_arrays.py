"""Decoded tokens of rows of several lengths take arrays in every layer, also in steps that finalize blocks."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.families.retrieval.attention import RetrievalAttention
from tests.support.ragged_rows import padded, prompt
from tests.support.tiny_models import tiny_model

SETTINGS = {"block_size": 4, "sink_tokens": 4, "local_windows_len": 8, "max_seq_len": 256, "kv_type": "FP32"}
LENGTHS = (50, 9, 31, 31, 64)
#: More tokens than a block, so that every row fills one.
TOKENS = 9


@torch.no_grad()
def decoded(model, prompts):
    """Logits [rows, TOKENS, vocab] behind a batch of prompts; the tokens differ between rows."""
    cache = HeteroCache(model, 256)
    token_ids, mask = padded(prompts)
    model(token_ids, attention_mask=mask, past_key_values=cache)
    new = torch.stack([(each[:1] + torch.arange(TOKENS)) % 90 + 2 for each in prompts])
    return torch.cat([model(new[:, at : at + 1], past_key_values=cache).logits for at in range(TOKENS)], dim=1)


def groups_per_call(monkeypatch):
    """A list that fills with the number of groups that each native call takes."""
    counts, attend = [], RetrievalAttention._attend_natively

    def counted(self, native, groups, *rest):
        counts.append(len(groups))
        return attend(self, native, groups, *rest)

    monkeypatch.setattr(RetrievalAttention, "_attend_natively", counted)
    return counts


def test_groups_of_two_stores_attend_one_by_one(monkeypatch):
    model = tiny_model("qwen2")
    inject(model, "dense", command_line=SETTINGS | {"weights": "q8_0"})
    prompts = [prompt(length, seed) for seed, length in enumerate((31, 40))]
    new = torch.tensor([[7], [9]])
    caches = [HeteroCache(model, 256) for _ in prompts]
    with torch.no_grad():
        for each, cache in zip(prompts, caches, strict=True):
            model(each[None], past_key_values=cache)
        expected = [model(new[row : row + 1], past_key_values=cache).logits for row, cache in enumerate(caches)]
        caches[0].crop(-1)
        caches[1].crop(-1)
        caches[0].extend(caches[1])
        counts = groups_per_call(monkeypatch)
        logits = model(new, past_key_values=caches[0]).logits
    assert counts == [1] * 2 * model.config.num_hidden_layers
    assert float((logits - torch.cat(expected)).norm() / logits.norm()) < 1e-4


@pytest.mark.parametrize(
    ("recipe", "settings", "groups"),
    [
        ("dense", {}, {4}),
        pytest.param("quest", {"top_k_blocks": 3}, {4}, marks=pytest.mark.slow),
        # With a schedule each group keeps its selection; the first layers attend to everything.
        ("quest", {"top_k_blocks": 3, "token_step": 2}, {1, 4}),
        ("adaptive", {"max_dense_blocks": 2, "top_k_blocks": 6}, {1}),
        pytest.param("adaptive", {}, {4}, marks=pytest.mark.slow),
    ],
)
def test_rows_of_several_lengths_take_arrays_and_are_what_they_are_alone(recipe, settings, groups, monkeypatch):
    model = tiny_model("qwen2")
    inject(model, recipe, command_line=SETTINGS | {"weights": "q8_0"} | settings)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = torch.cat([decoded(model, [each]) for each in prompts])
    tensors, whole = [], FusedDecodeLayer.queries_keys_values

    def counted(self, *arguments):
        tensors.append(self.operator.layer_idx)
        return whole(self, *arguments)

    monkeypatch.setattr(FusedDecodeLayer, "queries_keys_values", counted)
    in_one_call = groups_per_call(monkeypatch)
    together = decoded(model, prompts)
    assert float((together - alone).norm() / alone.norm()) < 1e-4
    assert set(in_one_call[4 * model.config.num_hidden_layers :]) == groups
    # The first token binds the native call of each layer.
    assert len(tensors) == model.config.num_hidden_layers
