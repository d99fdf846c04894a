"""Decoded tokens of rows of several lengths take arrays in every layer, also in steps that finalize blocks."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
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


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("dense", {}),
        ("quest", {"top_k_blocks": 3}),
        ("quest", {"top_k_blocks": 3, "token_step": 2}),
        ("adaptive", {"max_dense_blocks": 2, "top_k_blocks": 6}),
        ("adaptive", {}),
    ],
)
def test_rows_of_several_lengths_take_arrays_and_are_what_they_are_alone(recipe, settings, monkeypatch):
    model = tiny_model("qwen2")
    inject(model, recipe, command_line=SETTINGS | {"weights": "q8_0"} | settings)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = torch.cat([decoded(model, [each]) for each in prompts])
    tensors, whole = [], FusedDecodeLayer.queries_keys_values

    def counted(self, *arguments):
        tensors.append(self.operator.layer_idx)
        return whole(self, *arguments)

    monkeypatch.setattr(FusedDecodeLayer, "queries_keys_values", counted)
    together = decoded(model, prompts)
    assert float((together - alone).norm() / alone.norm()) < 1e-4
    # The first token binds the native call of each layer.
    assert len(tensors) == model.config.num_hidden_layers
