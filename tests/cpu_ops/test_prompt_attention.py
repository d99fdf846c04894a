"""Prompts in bfloat16 against the softmax formula in float64 of the same rounded numbers."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops import prompt_attention
from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.cpu_features import available, forced_isa, has
from hetero_kv.cpu_ops.prompt_attention import attend_prompt, attends_in_bfloat16
from hetero_kv.cpu_ops.prompt_attention_tiles import tiles_region
from hetero_kv.gpu_ops.attention import chunk_attention, sliding_window_attention
from tests.cpu_ops.rounded_attention import attention_and_bound

pytestmark = pytest.mark.skipif(not has("avx512bf16"), reason="this CPU has no dot products of bfloat16")
SCALE = 0.3
#: Whether by tiles: both where the CPU has them.
KERNELS = [False, True] if multiplies_by_tiles() else [False]


def kernel(by_tiles):
    """Within this context prompts attend by AMX's tiles, or by AVX-512's dot products."""
    return patch.object(prompt_attention, "multiplies_by_tiles", lambda: by_tiles)


def problem(batch, kv_heads, group, past, n, k_dim, v_dim, seed):
    """q, past keys and values, keys and values of the chunk, as a model lays them out: queries by token, then head."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, n, kv_heads * group, k_dim, generator=generator).bfloat16().transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, past + n, dim, generator=generator).bfloat16() for dim in (k_dim, v_dim))
    return q, k[:, :, :past], v[:, :, :past], k[:, :, past:], v[:, :, past:]


def bits(*tensors):
    return [each.view(torch.uint16).numpy() for each in tensors]


def reference(q, past_k, past_v, k, v, softcap=0.0, window=None):
    """Attention, its log-sum-exp and its bound (`attention_and_bound`)."""
    past, n = past_k.shape[2], q.shape[2]
    rows, columns = torch.arange(past, past + n)[:, None], torch.arange(past + n)[None]
    seen = (columns <= rows) & (columns > rows - (window or past + n))
    return attention_and_bound(q, torch.cat([past_k, k], 2), torch.cat([past_v, v], 2), seen, SCALE, softcap)


def assert_close(out, lse, expected, expected_lse, bound, allowed_lse=1e-5):
    assert bool(((out.double() - expected).abs() <= bound).all())
    assert (lse.double() - expected_lse).abs().max() < allowed_lse


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
    by_tiles=st.sampled_from(KERNELS),
    seed=st.integers(0, 999),
)
# A token with most of the weight, which is above 1, and a large value.
@example(
    batch=2, kv_heads=2, group=2, past=300, n=129, softcap=0.0, window=130, threads=1, by_tiles=KERNELS[-1], seed=2
)
def test_a_chunk_attends_to_its_past_and_causally_to_itself(
    batch, kv_heads, group, past, n, softcap, window, threads, by_tiles, seed
):
    inputs = problem(batch, kv_heads, group, past, n, 32, 48, seed)
    with kernel(by_tiles):
        out, lse = attend_prompt(*bits(*inputs), SCALE, softcap, window, threads)
    out = torch.from_numpy(out).view(torch.bfloat16).transpose(1, 2)
    assert_close(out, torch.from_numpy(lse), *reference(*inputs, softcap, window))


@pytest.mark.skipif(not multiplies_by_tiles(), reason="this CPU has no tiles of bfloat16")
def test_tiles_are_taken_where_there_are_any():
    assert prompt_attention._region("uint16", 32, 48, False) is tiles_region(32, 48, False)
    with kernel(False):
        assert prompt_attention._region("uint16", 32, 48, False) is not tiles_region(32, 48, False)


@pytest.mark.parametrize("by_tiles", KERNELS)
def test_more_queries_than_one_item_holds(by_tiles):
    inputs = problem(1, 2, 7, 100, 300, 16, 16, 3)
    with kernel(by_tiles):
        out, lse = attend_prompt(*bits(*inputs), SCALE)
        one, one_lse = attend_prompt(*bits(*inputs), SCALE, threads=1)
    np.testing.assert_array_equal(out, one)
    np.testing.assert_array_equal(lse, one_lse)
    assert_close(torch.from_numpy(out).view(torch.bfloat16).transpose(1, 2), torch.from_numpy(lse), *reference(*inputs))


@pytest.mark.parametrize("by_tiles", KERNELS)
def test_a_score_beyond_all_others_is_no_overflow(by_tiles):
    q, past_k, past_v, k, v = problem(1, 1, 2, 200, 50, 32, 48, 4)
    past_k[:, :, 150] *= 200
    with kernel(by_tiles):
        out, lse = attend_prompt(*bits(q, past_k, past_v, k, v), SCALE)
    found = torch.from_numpy(out).view(torch.bfloat16).transpose(1, 2)
    assert_close(found, torch.from_numpy(lse), *reference(q, past_k, past_v, k, v), allowed_lse=1e-2)


@pytest.mark.parametrize("by_tiles", KERNELS)
@pytest.mark.parametrize("rise", [0.01, 0.3])
def test_scores_may_rise_from_token_to_token(by_tiles, rise):
    """By less than sums are rescaled for, and so far that weights above the first tokens' would be infinite."""
    q, past_k, past_v, k, v = problem(1, 1, 2, 700, 50, 32, 48, 4)
    q[..., 0], past_k[..., 0], k[..., 0] = rise / SCALE, torch.arange(700), torch.arange(700, 750)
    with kernel(by_tiles):
        out, lse = attend_prompt(*bits(q, past_k, past_v, k, v), SCALE)
    found = torch.from_numpy(out).view(torch.bfloat16).transpose(1, 2)
    assert_close(found, torch.from_numpy(lse), *reference(q, past_k, past_v, k, v), allowed_lse=1e-3)


@pytest.mark.parametrize("by_tiles", KERNELS)
def test_masked_keys_have_no_weight_at_large_scales(by_tiles):
    inputs = problem(1, 1, 2, 0, 300, 16, 16, 4)
    with kernel(by_tiles):
        out, lse = attend_prompt(*bits(*inputs), 4.0, window=20)
    assert np.isfinite(lse).all()
    assert torch.from_numpy(out).view(torch.bfloat16).isfinite().all()


def test_dense_attention_takes_it_for_prompts_in_bfloat16():
    if not attends_in_bfloat16(32, 48):
        pytest.skip("torch's kernels are faster here")
    inputs = problem(1, 2, 2, 70, 40, 32, 48, 5)
    out, lse = chunk_attention(*inputs, SCALE)
    native, native_lse = attend_prompt(*bits(*inputs), SCALE)
    assert torch.equal(out.transpose(1, 2).contiguous(), torch.from_numpy(native).view(torch.bfloat16))
    assert torch.equal(lse, torch.from_numpy(native_lse))
    q, past_k, past_v, k, v = inputs
    out, lse = sliding_window_attention(q, torch.cat([past_k, k], 2), torch.cat([past_v, v], 2), 50, SCALE)
    assert_close(out, lse, *reference(*inputs, window=50))


def test_unsupported_inputs_are_refused():
    inputs = bits(*problem(1, 2, 2, 10, 5, 32, 48, 6))
    with pytest.raises(ValueError, match="do not fit"):
        attend_prompt(*inputs[:3], inputs[3][:, :1], inputs[4], SCALE)
    with pytest.raises(TypeError, match="bits of bfloat16"):
        attend_prompt(inputs[0].astype(np.float32), *inputs[1:], SCALE)
    with pytest.raises(ValueError, match="scale is 0"):
        attend_prompt(*inputs, 0.0)
    with pytest.raises(ValueError, match="multiples of 16"):
        attend_prompt(*bits(*problem(1, 1, 1, 0, 4, 24, 16, 0)), SCALE)
    with forced_isa("avx2" if "avx2" in available() else "generic"):
        assert not attends_in_bfloat16(64, 64)
