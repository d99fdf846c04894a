"""Attention over two sets of keys is merged to that over both."""

from __future__ import annotations

import torch

from gpu_ops.merge import merge_attention_in_torch


def test_attention_over_two_sets_is_that_over_both():
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(2, 4, 1, 9, generator=generator), torch.randn(2, 4, 9, 8, generator=generator)
    parts = [
        (scores[..., part].softmax(-1) @ values[:, :, part], scores[..., part].logsumexp(-1))
        for part in (slice(0, 3), slice(3, 9))
    ]
    out, lse = merge_attention_in_torch(*parts[0], *parts[1])
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
