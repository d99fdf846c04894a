"""Attention over two sets of keys merges to attention over both."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.gpu_ops.merge import merge_attention, merge_attention_in_torch
from tests.support.devices import simulated_cuda


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


@pytest.mark.cuda
def test_a_gpu_that_is_not_the_present_one_merges_what_lies_on_it():
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(2, 1, 4, 3, 16, generator=generator), torch.randn(2, 1, 4, 3, generator=generator)
    expected = merge_attention_in_torch(outs[0], lses[0], outs[1], lses[1])
    with simulated_cuda(devices=2):
        parts = [part.to("cuda:1") for part in (outs[0], lses[0], outs[1], lses[1])]
        merged = merge_attention(*parts)
        assert {part.device.index for part in merged} == {1}
        for part, other in zip(merged, expected, strict=True):
            torch.testing.assert_close(part.cpu(), other)
