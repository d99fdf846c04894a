"""The keys of the 7B benchmark are scored by its queries as those of a real prefill."""

import pytest
import torch

from benchmarks.attention_scores import of_heads
from benchmarks.seven_billion import DIM, KV_HEADS, SCORES, SevenBillionPrompt, rotated_bias

TOKENS = 40_000


@pytest.mark.parametrize("layer", [0, 5])
def test_scores_of_keys_have_the_deviations_and_shares_of_real_ones(layer):
    prompt = SevenBillionPrompt(TOKENS, torch.float32, layer)
    # Queries of the answer, a few tokens behind.
    q = torch.stack([rotated_bias(layer, TOKENS + ahead) for ahead in range(16)], dim=1)
    found = of_heads(q[None], prompt.keys, DIM**-0.5)
    heads = [SCORES[(layer * KV_HEADS + head) % len(SCORES)] for head in range(KV_HEADS)]
    for (deviation, share), (expected, between) in zip(found, heads, strict=True):
        assert deviation == pytest.approx(expected, rel=0.05)
        assert share == pytest.approx(between, abs=0.08)


def test_queries_are_rotated_as_the_model_does():
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    position, query = 12_345, rotated_bias(3, 0)
    angles = position * 1e6 ** (-torch.arange(DIM // 2).double() / (DIM // 2))
    both = torch.cat([angles, angles])[None].float()
    expected, _ = apply_rotary_pos_emb(query[None, :, None], query[None, :, None], both.cos(), both.sin())
    torch.testing.assert_close(rotated_bias(3, position), expected[0, :, 0], rtol=1e-3, atol=1e-2)
