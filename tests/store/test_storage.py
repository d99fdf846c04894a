"""Storage codecs: GGML's exact bytes, and errors within half a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.errors import HeteroKVError
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool
from tests.support.storage_formats import decoded, encoded

kinds = pytest.mark.parametrize("kind", [storage.get(name) for name in storage.names()], ids=storage.names())


def vectors(seed, spread=1.0, dim=64):
    return torch.randn(3, 5, dim, generator=torch.Generator().manual_seed(seed)) * spread


@kinds
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), spread=st.sampled_from([1e-4, 1.0, 300.0]))
def test_kernels_read_what_the_codec_decodes(kind, seed, spread):
    pool = BlockPool(3, 1, 5, 64, 64, kind, 1)
    kind.write(pool.keys[:, 0], vectors(seed, spread))
    np.testing.assert_array_equal(decoded(pool.key_array)[:, 0], kind.decode(pool.keys[:, 0]).double().numpy())


@pytest.mark.parametrize(("kind", "steps"), [(storage.Q8_0, 127), (storage.Q4_0, 8)], ids=["Q8_0", "Q4_0"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), spread=st.sampled_from([1e-3, 1.0, 300.0]))
def test_a_group_is_rounded_to_steps_of_its_largest_number(kind, steps, seed, spread):
    inputs = vectors(seed, spread)
    groups, restored = (v.unflatten(-1, (-1, 32)) for v in (inputs, kind.decode(kind.encode(inputs))))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # Half a step, but for the numbers of Q4_0 that are a step beyond the nibble's positive end.
    # The scale is a number of 16 bits: rounded by 2^-11 of its size, and by 2^-25 where it is subnormal.
    step = largest / steps * (1 + 2**-10)
    scale_error = steps * (largest / steps * 2**-11).clamp_min(2**-25)
    beyond = (groups / groups.gather(-1, groups.abs().argmax(-1, keepdim=True))) < -7.5 / 8
    allowed = torch.where(beyond, step, step / 2) if kind is storage.Q4_0 else step / 2
    assert ((restored - groups).abs() <= allowed + scale_error * (1 + 2**-10)).all()


@pytest.mark.parametrize("kind", [storage.Q8_0, storage.Q4_0], ids=["Q8_0", "Q4_0"])
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    spread=st.sampled_from([1e-6, 1e-3, 1.0, 300.0]),
    # Halves between two steps, where roundings differ, and numbers of one size.
    grid=st.sampled_from([None, 0.5, 1.0]),
)
def test_the_bytes_are_those_that_ggml_writes(kind, seed, spread, grid):
    numbers = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)) * spread
    numbers[::7] = 0
    if grid is not None:
        steps = 127 if kind is storage.Q8_0 else 8
        numbers = (numbers / spread * steps / 2 / grid).round().clamp(-steps / grid, steps / grid) * grid
        numbers[:, ::32] = -steps
    theirs = encoded(numbers.numpy(), kind.kernel_dtype).view(np.uint8)
    np.testing.assert_array_equal(kind.encode(numbers).numpy(), theirs)


@pytest.mark.parametrize("kind", [storage.Q8_0, storage.Q4_0], ids=["Q8_0", "Q4_0"])
def test_zeros_and_numbers_too_small_for_the_scale_become_zero(kind):
    # The inverse of the last one's scale is beyond float32.
    tiny = torch.cat([torch.zeros(32), torch.full((32,), 1e-9), torch.full((32,), 1e-40)])
    assert torch.equal(kind.decode(kind.encode(tiny)), torch.zeros(96))


@kinds
@settings(max_examples=15, deadline=None)
@given(pieces=st.lists(st.integers(1, 90), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_appended_pieces_are_read_back_as_the_codec_decodes_them(kind, pieces, seed):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, sum(pieces), 32, generator=generator) for _ in range(2))
    pool, ids, start = BlockPool(20, 2, 32, 32, 32, kind, 1), np.arange(20, dtype=np.int32)[::-1], 0
    for piece in pieces:
        pool.write(ids, start, keys[:, start : start + piece], values[:, start : start + piece])
        start += piece
    read = torch.empty_like(keys), torch.empty_like(values)
    pool.gather(ids, start, *read)
    assert torch.equal(read[0], kind.decode(kind.encode(keys)).float())
    assert torch.equal(read[1], kind.decode(kind.encode(values)).float())


@settings(max_examples=25, deadline=None)
@given(pieces=st.lists(st.integers(1, 90), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_keys_are_read_back_with_their_offset(pieces, seed):
    generator = torch.Generator().manual_seed(seed)
    # What all keys of a channel have in common is larger by far than how they differ.
    common = 30 * torch.randn(2, 1, 32, generator=generator)
    keys, values = (torch.randn(2, sum(pieces), 32, generator=generator) for _ in range(2))
    exact, coarse = (BlockPool(20, 2, 32, 32, 32, kind, 1, offset_keys=True) for kind in (storage.FP32, storage.Q4_0))
    ids, start = np.random.default_rng(seed).permutation(20).astype(np.int32), 0
    for piece in pieces:
        part = slice(start, start + piece)
        for pool in (exact, coarse):
            pool.write(ids, start, (keys + common)[:, part], values[:, part])
        start += piece
    torch.testing.assert_close(exact.read_keys(ids, 0, start), keys + common, rtol=0, atol=2e-5)
    # A step is an eighth of the largest difference; the beyond of the nibble's positive end is a whole one.
    assert (coarse.read_keys(ids, 0, start) - keys - common).abs().max() < 1.2
    first, last = start // 3, start - start // 5
    assert torch.equal(coarse.read_keys(ids, first, last), coarse.read_keys(ids, 0, start)[:, first:last])
    full = start // 32
    by_block = exact.decoded_keys(torch.from_numpy(ids[:full].astype(np.int64))).transpose(0, 1).flatten(1, 2)
    assert torch.equal(by_block, exact.read_keys(ids, 0, full * 32))
    pool_copy = int(ids[-1])
    coarse.copy(int(ids[0]), pool_copy)
    assert torch.equal(coarse.read_keys(np.array([pool_copy]), 0, 1), coarse.read_keys(ids, 0, 1))


def test_offsets_are_finite_where_a_mean_is_beyond_half_precision():
    pool = BlockPool(1, 1, 32, 32, 32, storage.FP32, 1, offset_keys=True)
    keys = torch.full((1, 32, 32), 1e6)
    pool.write(np.zeros(1, np.int32), 0, keys, keys)
    assert torch.equal(pool.read_keys(np.zeros(1, np.int32), 0, 32), keys)


def test_q8_0_takes_half_and_q4_0_a_quarter_of_the_dram_of_fp16():
    sizes = {name: storage.get(name).bytes_per_vector(128) for name in storage.names()}
    assert sizes == {"FP32": 512, "FP16": 256, "BF16": 256, "Q8_0": 136, "Q4_0": 72}


def test_vectors_that_are_no_whole_groups_are_refused_with_a_remedy():
    with pytest.raises(
        HeteroKVError, match=r"Q8_0 stores numbers in groups of 32.*dimension 80; set kv_type .* to FP16"
    ):
        storage.Q8_0.bytes_per_vector(80)
