"""The error bound of attention in bfloat16, on any CPU: two roundings keep it, a third breaks it."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cpu_ops.rounded_attention import attention_and_bound

SCALE = 0.3


def rounded_attention(q, keys, values, seen, stale, round_scores=False):
    """What a kernel computes in float32 with weights relative to 2 ** -stale times the largest one."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(group, 1) for each in (keys, values))
    scores = (q.float() @ keys.transpose(-1, -2) * SCALE).masked_fill(~seen, float("-inf"))
    if round_scores:
        scores = scores.bfloat16().float()
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * 2**stale
    return (weights.bfloat16().float() @ values / weights.sum(-1, keepdim=True)).bfloat16()


def problem(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, 4, 50, 32), (1, 2, tokens, 32), (1, 2, tokens, 48)
    q, keys, values = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    seen = torch.rand(50, tokens, generator=generator) < 0.7
    seen[:, 0] = True
    return q, keys, values, seen


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 300), stale=st.floats(0, 8), seed=st.integers(0, 999))
@example(tokens=130, stale=0.7, seed=2)
def test_rounded_weights_and_outputs_stay_within_the_bound(tokens, stale, seed):
    tensors = problem(tokens, seed)
    out, _, bound = attention_and_bound(*tensors, SCALE)
    assert bool(((rounded_attention(*tensors, stale).double() - out).abs() <= bound).all())


def test_scores_rounded_to_bfloat16_exceed_the_bound():
    tensors = problem(130, 2)
    out, _, bound = attention_and_bound(*tensors, SCALE)
    found = rounded_attention(*tensors, 0.0, round_scores=True).double()
    assert bool(((found - out).abs() > bound).any())
