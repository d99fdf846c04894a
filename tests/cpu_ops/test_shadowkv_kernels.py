"""Kernels of ShadowKV's decode step equal the torch functions of other devices."""

import numpy as np
import pytest
import torch

from hetero_kv.cpu_ops.chunk_slots import KeyFactorArrays, hold_chunks
from hetero_kv.cpu_ops.contiguous_decode import TokenRange, attend_ranges
from hetero_kv.cpu_ops.landmark_choice import best_chunks
from hetero_kv.families.shadowkv.cpu_decode import arrays_of
from hetero_kv.families.shadowkv.landmarks import chosen_chunks
from hetero_kv.families.shadowkv.resident_chunks import ResidentChunks
from hetero_kv.gpu_ops.rebuild import rebuilt_chunks_in_torch
from hetero_kv.gpu_ops.rotary import RotaryLayout
from hetero_kv.gpu_ops.tiled_attention import tiled_attention
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool
from tests.support.slow_variants import combined, with_few


def randoms(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def permutations(*shape, count, seed=0):
    """The first `count` of random permutations."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).argsort(dim=-1)[..., :count].contiguous()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("chunks", "outliers", "count"), [(60, 8, 8), (133, 5, 128), (7, 0, 3)])
def test_chosen_chunks_are_those_that_torch_chooses(chunks, outliers, count, softcap):
    q, landmarks = randoms(2, 9, 1, 18), randoms(2, 3, chunks + 5, 18, seed=1)
    # Behind the landmarks nothing is read.
    landmarks[:, :, chunks:] = float("nan")
    ids = permutations(2, 3, chunks, count=outliers)
    expected = chosen_chunks(q, landmarks[:, :, :chunks], ids, count, 0.3, softcap).sort(dim=2).values
    arguments = q.view(2, 3, 3, 18).numpy(), landmarks.numpy(), ids.numpy(), chunks, count, 0.3, softcap or 0.0
    assert best_chunks(*arguments).tolist() == expected.tolist()


def along_one_channel(*numbers):
    """[1, 1, len(numbers), 18] with these numbers in the first channel, and zeros."""
    found = np.zeros((1, 1, len(numbers), 18), np.float32)
    found[0, 0, :, 0] = numbers
    return found


def test_an_outlier_is_never_chosen_even_where_shares_underflow():
    q, landmarks = along_one_channel(1, 1, 1), along_one_channel(1e38, 0, -1e38, 9e37)
    assert best_chunks(q, landmarks, np.zeros((1, 1, 1), np.int64), 4, 3, 100.0).tolist() == [[[1, 2, 3]]]


def test_an_outlier_that_is_no_chunk_and_too_many_chunks_are_refused():
    q, landmarks, ids = along_one_channel(1, 1, 1), along_one_channel(1, 1, 1, 1), np.full((1, 1, 1), 4)
    with pytest.raises(IndexError, match=r"chunks are 0\.\.3"):
        best_chunks(q, landmarks, ids, 4, 1, 1.0)
    with pytest.raises(ValueError, match="4 of 4 chunks"):
        best_chunks(q, landmarks, ids, 4, 4, 1.0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("softcap", [None, 3.0])
# The first is the kernel of a tiny llama too.
@pytest.mark.parametrize(
    ("dtype", "group", "dim"),
    with_few([(torch.float32, 2, 16), (torch.float16, 3, 18), (torch.bfloat16, 3, 18)]),
)
@pytest.mark.parametrize("counts", [(128, 70), (0, 3), (133, 0)])
def test_attention_to_two_ranges_is_that_to_their_union(counts, dtype, group, dim, softcap, threads):
    q = randoms(2, 3, group, dim)
    parts = [[randoms(2, 3, n + 9, dim, seed=seed).to(dtype) for seed in (1, 2)] for n in counts]
    ranges = [TokenRange(*arrays_of(*part), 4, n) for part, n in zip(parts, counts, strict=True)]
    pairs = zip(*([t[:, :, 4 : 4 + n] for t in part] for part, n in zip(parts, counts, strict=True)), strict=True)
    keys, values = (torch.cat(pair, dim=2).float() for pair in pairs)
    expected = tiled_attention(q, keys, values, 0.3, softcap)
    actual = attend_ranges(q.numpy(), *ranges, 0.3, softcap or 0.0, min(threads, torch.get_num_threads()))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=1e-4, atol=1e-5)


def test_tokens_beyond_a_range_are_refused():
    keys = np.ones((1, 1, 4, 16), np.float32)
    ranges = TokenRange(keys, keys, 0, 4), TokenRange(keys, keys, 2, 3)
    with pytest.raises(IndexError, match="3 from 2 of 4"):
        attend_ranges(np.ones((1, 1, 2, 16), np.float32), *ranges, 1.0)


@pytest.mark.parametrize(
    ("layout", "dtype", "kind"),
    combined(
        [RotaryLayout(9), RotaryLayout(3, 4, True), RotaryLayout(0)], [torch.float32, torch.bfloat16], ["FP16", "Q8_0"]
    ),
)
def test_slots_equal_torchs(layout, dtype, kind):
    rows, heads, chunks, size, k_dim, v_dim, rank, slots = 2, 3, 12, 6, 18, 32, 9, 5
    pool = BlockPool(40, heads, size, 0, v_dim, storage.get(kind), 0)
    pool.values.copy_(pool.value_storage.encode(randoms(40, heads, size, v_dim)))
    table = permutations(rows, 40, count=chunks)
    coefficients, basis = randoms(rows, chunks * size, rank).to(dtype), randoms(rows, heads, rank, k_dim).to(dtype)
    cos, sin = (randoms(chunks * size + 3, layout.pairs, seed=seed).to(dtype) for seed in (1, 2))
    factors = KeyFactorArrays(*arrays_of(coefficients, basis, cos, sin), *layout)

    def rebuild(ids):
        return rebuilt_chunks_in_torch(coefficients, basis, cos, sin, layout, ids, size)

    def fetch(ids):
        blocks = table[torch.arange(rows)[:, None, None], ids]
        return pool.value_storage.decode(pool.values[blocks, torch.arange(heads)[:, None]]).to(dtype)

    exact = [randoms(rows, heads, 2, size, dim).to(dtype) for dim in (k_dim, v_dim)]
    expected, actual = ResidentChunks(*exact), ResidentChunks(*exact)
    actual.provide(slots)
    for seed in range(4):
        ids = permutations(rows, heads, chunks, count=slots, seed=seed)
        arrays = ids.numpy(), actual.ids.numpy(), *arrays_of(*actual.buffers), factors
        hits = hold_chunks(*arrays, table.int().numpy(), pool.value_array, chunks)
        assert hits == expected.hold(ids, rebuild, fetch, chunks)
        assert torch.equal(actual.ids, expected.ids)
        assert torch.equal(actual.values, expected.values)
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(actual.keys, expected.keys, **close)
    ids = torch.full((rows, heads, slots), chunks)
    with pytest.raises(IndexError, match="must be below 12"):
        hold_chunks(ids.numpy(), *arrays[1:], table.int().numpy(), pool.value_array, chunks)
