"""Prompts in float32 against the softmax formula in float64."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.cpu_features import available, forced_isa
from hetero_kv.cpu_ops.prompt_attention import attend_prompt
from hetero_kv.gpu_ops import attention
from hetero_kv.gpu_ops.attention import chunk_attention, sliding_window_attention

SCALE = 0.3


def problem(batch, kv_heads, group, past, n, k_dim, v_dim, seed):
    """q, past keys and values, keys and values of the chunk; queries lie by token, then head."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, n, kv_heads * group, k_dim, generator=generator).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, past + n, dim, generator=generator) for dim in (k_dim, v_dim))
    return q, k[:, :, :past], v[:, :, :past], k[:, :, past:], v[:, :, past:]


def reference(q, past_k, past_v, k, v, softcap=0.0, window=None):
    """Attention [batch, heads, n, v_dim] and its log-sum-exp, in float64."""
    past, n, group = past_k.shape[2], q.shape[2], q.shape[1] // k.shape[1]
    keys, values = (torch.cat(parts, 2).double().repeat_interleave(group, 1) for parts in ((past_k, k), (past_v, v)))
    scores = q.double() @ keys.mT * SCALE
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = torch.arange(past, past + n)[:, None], torch.arange(past + n)[None]
    scores = scores.masked_fill((columns > rows) | (columns <= rows - (window or past + n)), -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def assert_close(out, lse, expected, expected_lse):
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


def attend(inputs, *settings, **named):
    out, lse = attend_prompt(*(each.numpy() for each in inputs), SCALE, *settings, **named)
    return torch.from_numpy(out).transpose(1, 2), torch.from_numpy(lse)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    past=st.sampled_from([0, 1, 63, 128, 130, 300]),
    n=st.sampled_from([1, 5, 6, 40, 129, 400]),
    softcap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([None, 1, 7, 130]),
    threads=st.integers(1, 2),
    isa=st.sampled_from(available()),
    seed=st.integers(0, 999),
)
# More queries than one item holds, of which the last fill a part of a tile, and windows that end within tiles.
@example(batch=1, kv_heads=2, group=7, past=130, n=129, softcap=0.0, window=130, threads=2, isa=available()[0], seed=1)
def test_a_chunk_attends_to_its_past_and_causally_to_itself(
    batch, kv_heads, group, past, n, softcap, window, threads, isa, seed
):
    inputs = problem(batch, kv_heads, group, past, n, 20, 44, seed)
    with forced_isa(isa):
        found = attend(inputs, softcap, window, threads=threads)
    assert_close(*found, *reference(*inputs, softcap, window))


def test_threads_do_not_change_a_bit():
    inputs = problem(1, 2, 7, 100, 300, 20, 44, 3)
    for one, two in zip(attend(inputs, threads=1), attend(inputs, threads=2), strict=True):
        assert torch.equal(one, two)


def test_a_score_beyond_all_others_is_no_overflow():
    q, past_k, past_v, k, v = problem(1, 1, 2, 200, 50, 20, 44, 4)
    past_k[:, :, 150] *= 200
    out, lse = attend([q, past_k, past_v, k, v])
    expected, expected_lse = reference(q, past_k, past_v, k, v)
    assert out.isfinite().all()
    # A score of hundreds has fewer digits behind its point.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-3)


def test_masked_keys_have_no_weight_at_large_scales():
    inputs = problem(1, 1, 2, 0, 300, 20, 44, 4)
    out, lse = attend_prompt(*(each.numpy() for each in inputs), 40.0, window=20)
    assert np.isfinite(lse).all()
    assert np.isfinite(out).all()


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_need_not_be_positive(scale):
    q, *others = problem(1, 1, 2, 70, 40, 20, 44, 7)
    out, lse = attend_prompt(q.numpy(), *(each.numpy() for each in others), scale)
    expected = reference(q * (scale / SCALE), *others)
    assert_close(torch.from_numpy(out).transpose(1, 2), torch.from_numpy(lse), *expected)


@pytest.mark.skipif("avx2" not in available(), reason="other CPUs take other kernels")
def test_dense_attention_takes_it_for_prompts(monkeypatch):
    inputs = q, past_k, past_v, k, v = problem(1, 2, 2, 70, 128, 20, 44, 5)
    whole = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    with forced_isa("avx2"):
        by_torch = Mock(side_effect=attention.attention_with_lse)
        monkeypatch.setattr(attention, "attention_with_lse", by_torch)
        assert_close(*chunk_attention(*inputs, SCALE), *reference(*inputs))
        assert_close(*chunk_attention(*inputs, SCALE, 3.0), *reference(*inputs, 3.0))
        assert_close(*sliding_window_attention(q, *whole, 50, SCALE), *reference(*inputs, window=50))
        assert not by_torch.called
        shorter = problem(1, 2, 2, 70, 127, 20, 44, 5)
        assert_close(*chunk_attention(*shorter, SCALE), *reference(*shorter))
        assert by_torch.called


def test_arrays_of_two_dtypes_are_refused():
    inputs = [each.numpy() for each in problem(1, 2, 2, 10, 5, 20, 44, 6)]
    with pytest.raises(TypeError, match="float32 or the bits of bfloat16"):
        attend_prompt(inputs[0].view(np.uint32), *inputs[1:], SCALE)
    with pytest.raises(TypeError, match="float32 or the bits of bfloat16"):
        attend_prompt(*(each.astype(np.float64) for each in inputs), SCALE)
