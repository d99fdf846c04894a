"""Chunk and window attention equal the softmax formula in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.gpu_ops.attention import attention_with_lse, chunk_attention, sliding_window_attention, tiled_attention
from hetero_kv.gpu_ops.merge import apply_sink, merge_attention


def reference(q, k, v, scale, softcap=None, mask=None, sink=None):
    """Softmax attention, q [b, h, n, d], k and v [b, h, m, d], in float64, and its log-sum-exp."""
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    denominator = lse if sink is None else torch.logaddexp(lse, sink.double()[None, :, None].expand_as(lse))
    return torch.exp(scores - denominator[..., None]) @ v.double(), lse


def random_qkv(batch, kv_heads, group, n, m, k_dim, v_dim, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, kv_heads * group, n, k_dim, generator=generator)
    k = torch.randn(batch, kv_heads, m, k_dim, generator=generator)
    v = torch.randn(batch, kv_heads, m, v_dim, generator=generator)
    return q, k, v


def close(actual, expected):
    return torch.allclose(actual.double(), expected, rtol=1e-5, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    past=st.integers(0, 70),
    n=st.integers(1, 40),
    dims=st.sampled_from([(16, 16), (24, 16), (16, 32)]),
    softcap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 999),
)
def test_chunk_attention_is_causal_attention_over_past_and_chunk(batch, kv_heads, group, past, n, dims, softcap, seed):
    q, k, v = random_qkv(batch, kv_heads, group, n, past + n, *dims, seed)
    out, lse = chunk_attention(q, k[:, :, :past], v[:, :, :past], k[:, :, past:], v[:, :, past:], 0.3, softcap)
    mask = torch.arange(past + n)[None, :] <= torch.arange(past, past + n)[:, None]
    expected, expected_lse = reference(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 0.3, softcap, mask
    )
    assert close(out, expected)
    assert close(lse, expected_lse)


@settings(max_examples=40, deadline=None)
@given(
    window=st.integers(1, 50),
    past=st.integers(0, 49),
    n=st.sampled_from([1, 2, 33, 300]),
    group=st.sampled_from([1, 3]),
    softcap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 999),
)
def test_sliding_window_attention_sees_the_last_window_keys(window, past, n, group, softcap, seed):
    q, k, v = random_qkv(1, 2, group, n, past + n, 16, 16, seed)
    out, lse = sliding_window_attention(q, k, v, window, 0.3, softcap)
    rows, columns = torch.arange(past, past + n)[:, None], torch.arange(past + n)[None, :]
    mask = (columns <= rows) & (columns > rows - window)
    expected, expected_lse = reference(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 0.3, softcap, mask
    )
    assert close(out, expected)
    assert close(lse, expected_lse)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_and_tiled_attention_agree(causal):
    q, k, v = random_qkv(2, 4, 1, 300, 300, 32, 32, seed=3)
    for flash, tiled in zip(
        attention_with_lse(q, k, v, 0.2, causal=causal), tiled_attention(q, k, v, 0.2, causal=causal), strict=True
    ):
        torch.testing.assert_close(flash, tiled, rtol=1e-5, atol=2e-6)


def test_merging_the_attention_over_two_halves_gives_the_whole():
    q, k, v = random_qkv(2, 3, 1, 5, 40, 16, 16, seed=1)
    halves = [reference(q, k[:, :, part], v[:, :, part], 0.25) for part in (slice(0, 13), slice(13, 40))]
    out, lse = merge_attention(*halves[0], *halves[1])
    expected, expected_lse = reference(q, k, v, 0.25)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_merging_with_an_empty_set_changes_nothing():
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    empty = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    merged, merged_lse = merge_attention(*empty, out, lse)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse)
    assert not merge_attention(*empty, *empty)[0].isnan().any()


def test_a_sink_takes_its_share_of_the_softmax():
    q, k, v = random_qkv(1, 4, 1, 6, 20, 16, 16, seed=2)
    sink = torch.tensor([-3.0, 0.0, 2.0, 50.0])
    out, lse = reference(q, k, v, 0.25)
    with_sink, lse_with_sink = apply_sink(out, lse, sink)
    torch.testing.assert_close(with_sink, reference(q, k, v, 0.25, sink=sink)[0], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(lse_with_sink[0, 0], torch.logaddexp(lse[0, 0].float(), sink[0]))
