"""The masses of blocks by coarse copies of their keys equal a short reference in torch."""

import itertools

import numpy as np
import pytest
import torch

from hetero_kv.cpu_ops import int4_key_scores
from hetero_kv.cpu_ops.cpu_features import available, forced_isa
from hetero_kv.cpu_ops.parallel_region import call_region
from hetero_kv.store.key_codes import encode

BLOCKS, KV_HEADS, GROUP, BLOCK, DIM = 7, 2, 9, 32, 20


def decoded(codes):
    """[blocks, kv_heads, BLOCK, DIM] of codes [blocks, kv_heads, 1, bytes]: tiles of 16 tokens, 8 channels a vector."""
    padded = -(-DIM // 8) * 8
    packed, scales = codes.flatten(2).split([BLOCK * padded // 2, 2 * BLOCK], dim=2)
    packed = packed.reshape(*codes.shape[:2], BLOCK // 16, padded // 8, 16, 1, 4)
    numbers = torch.cat([packed & 15, packed >> 4], dim=5).int() - 8
    numbers = numbers.transpose(3, 4).reshape(*codes.shape[:2], BLOCK, padded)[..., :DIM]
    return numbers * scales.contiguous().view(torch.float16).float().unsqueeze(-1)


def as_int8(queries):
    """Queries with their numbers rounded to the nearest of 127 on either side of zero."""
    step = queries.abs().amax(-1, keepdim=True) / 127
    return (queries / step).round() * step


@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=pytest.mark.slow if isa == "generic" else ()) for isa in available()]
)
# Powers of the larger scores leave float32's range.
@pytest.mark.parametrize("size", [0.3, 40.0])
def test_masses_are_those_of_scores_by_the_codes(isa, size):
    generator = torch.Generator().manual_seed(4)
    keys = torch.randn(BLOCKS, KV_HEADS, BLOCK, DIM, generator=generator) * 3
    means = torch.randn(BLOCKS, KV_HEADS, 1, DIM, generator=generator) * 5
    q = torch.randn(1, KV_HEADS, GROUP, DIM, generator=generator)
    codes = encode(keys)
    assert (decoded(codes) - keys).abs().max() <= 0.0625 * keys.abs().amax(-1).max() * 1.01
    table = np.array([[6, 1, 3, 0, 5]], np.int32)
    there = torch.from_numpy(table[0].astype(np.int64))
    scores = torch.einsum("hgd,bhtd->hgbt", as_int8(q[0]), decoded(codes)[there])
    of_means = torch.einsum("hgd,bhtd->hgbt", q[0], means[there]) * size
    scores = scores * size + of_means
    chosen = np.array([[[0, 2, 3, -1], [4, -1, -1, -1]]], np.int32)
    with forced_isa(isa):
        region = int4_key_scores.region_for(
            tuple(q.shape), tuple(codes.shape), tuple(means.shape), BLOCK, np.dtype(np.float32)
        )
        for softcap in (0.0, 4.0):
            capped, all_mean = (
                softcap * torch.tanh(each / softcap) if softcap else each for each in (scores, of_means)
            )
            for positions, scores_tokens in itertools.product((np.empty((1, 1, 0), np.int32), chosen), (True, False)):
                weights, masses = np.full((2, 1, KV_HEADS, GROUP, 5), 7, np.float32)
                places = positions.shape[2] or 5
                of_tokens = np.full((1, KV_HEADS, GROUP, places * BLOCK if scores_tokens else 0), 7, np.float32)
                arguments = (
                    q.numpy(),
                    codes.numpy(),
                    means.numpy(),
                    table,
                    positions,
                    size,
                    softcap,
                    weights,
                    masses,
                    of_tokens,
                )
                call_region("candidates", "uint8,float32", region, arguments, threads=2)
                # Of as many tokens as have the mean's score each, and of the tokens themselves.
                for found, every in ((weights, all_mean.expand_as(capped)), (masses, capped)):
                    expected = every.logsumexp(-1)
                    if positions.size:
                        expected = torch.full_like(expected, 7.0)
                        for head, at in enumerate(([0, 2, 3], [4])):
                            expected[head][:, at] = every[head].logsumexp(-1)[:, at]
                    np.testing.assert_allclose(found[0], expected, rtol=2e-5, atol=7e-5 * size)
                if not scores_tokens:
                    continue
                by_place = torch.full((KV_HEADS, GROUP, places, BLOCK), 7.0)
                for head, at in enumerate(([0, 2, 3], [4]) if positions.size else ([0, 1, 2, 3, 4],) * KV_HEADS):
                    by_place[head][:, : len(at)] = capped[head][:, at]
                np.testing.assert_allclose(of_tokens[0], by_place.flatten(2), rtol=2e-5, atol=7e-5 * size)


def test_the_largest_number_of_a_token_is_met_and_zeros_stay_zeros():
    keys = torch.zeros(1, 1, 16, DIM)
    keys[0, 0, 3, 7], keys[0, 0, 3, 2] = -6.5, 3.0
    found = decoded_of_tile(encode(keys))
    assert found[3, 7] == -6.5
    assert abs(found[3, 2] - 3.0) < 0.5
    found[3] = 0
    assert not found.any()


def decoded_of_tile(codes):
    """As `decoded`, of one block of 16 tokens: [16, DIM]."""
    both = torch.cat([codes[..., : 16 * 12], codes[..., : 16 * 12], codes[..., -32:], codes[..., -32:]], dim=-1)
    return decoded(both)[0, 0, :16]


def test_blocks_that_are_no_whole_tiles_are_refused():
    with pytest.raises(ValueError, match="do not fit blocks of 24 tokens"):
        int4_key_scores.region_for((1, 2, 3, 8), (5, 2, 1, 24 * 6), (5, 2, 1, 8), 24, np.dtype(np.float32))
    with pytest.raises(ValueError, match="kv_heads and k_dim must be equal"):
        int4_key_scores.region_for((1, 2, 3, 8), (5, 1, 1, 16 * 6), (5, 2, 1, 8), 16, np.dtype(np.float32))
