"""Stored tokens equal torch's conversion; invalid positions are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.token_store import store_token, store_tokens, stores
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool
from tests.support.slow_variants import with_slow

BLOCKS, KV_HEADS, BLOCK, K_DIM, V_DIM = 6, 2, 4, 64, 32
NATIVE = [storage.FP32, storage.FP16, storage.BF16, storage.Q8_0, storage.Q4_0]
NARROW = (storage.FP16, storage.Q8_0, storage.Q4_0)
PAIRS = [
    *((kind, kind) for kind in NATIVE), (storage.FP16, storage.FP32), (storage.BF16, storage.FP16),
    (storage.Q8_0, storage.Q4_0), (storage.Q4_0, storage.BF16),
]  # fmt: skip
#: Keys of one type and values of another are in tests/operators/test_storage_types.py.
SELDOM = ("FP16-FP32", "BF16-FP16", "Q8_0-Q4_0", "Q4_0-BF16")
pairs = pytest.mark.parametrize(
    "pair", with_slow({f"{keys.name}-{values.name}": (keys, values) for keys, values in PAIRS}, slow=SELDOM)
)


def new_pool(kind, value_kind=None):
    return BlockPool(BLOCKS, KV_HEADS, BLOCK, K_DIM, V_DIM, kind, 1, value_storage=value_kind)


def numbers(*shape, seed, spread):
    """Numbers of many sizes, some of them halfway between two of the storage type."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator) * 10 ** torch.empty(shape).uniform_(-8, spread, generator=generator)
    coarse = torch.randint(0, 3, shape, generator=generator)
    return torch.where(coarse == 0, drawn, torch.where(coarse == 1, drawn.half().float(), drawn.bfloat16().float()))


@pairs
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 3), position=st.integers(0, 2 * BLOCK - 1))
def test_a_stored_token_is_torchs_conversion_to_the_bit(pair, seed, rows, position):
    pool = new_pool(*pair)
    keys = numbers(rows, KV_HEADS, K_DIM, seed=seed, spread=4)
    values = numbers(rows, KV_HEADS, V_DIM, seed=seed + 1, spread=4)
    table = np.random.default_rng(seed).permutation(BLOCKS).astype(np.int32).reshape(3, 2)[:rows].copy()
    largest = store_token(keys.numpy(), values.numpy(), pool.key_array, pool.value_array, table, position)
    blocks, offset = table[:, position // BLOCK].tolist(), position % BLOCK
    assert torch.equal(pool.keys[blocks][:, :, offset], pair[0].encode(keys))
    assert torch.equal(pool.values[blocks][:, :, offset], pair[1].encode(values))
    measured = [
        numbers.abs().max()
        for numbers, kind in zip((keys, values), pair, strict=True)
        if pair[0] is pair[1] or kind in NARROW
    ]
    assert largest == max(measured)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from([storage.Q8_0, storage.Q4_0]))
def test_groups_are_encoded_as_torch_does_it_also_where_they_are_odd(seed, kind):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-3, 4, (1, KV_HEADS, K_DIM), generator=generator) * torch.tensor([0.5, 1e-39])[:, None]
    values = torch.randn(1, KV_HEADS, V_DIM, generator=generator) * torch.tensor([0.0, 1e-7])[:, None]
    pool = new_pool(kind)
    store_token(keys.numpy(), values.numpy(), pool.key_array, pool.value_array, np.zeros((1, 1), np.int32), 0)
    for pooled, numbers in ((pool.keys, keys), (pool.values, values)):
        # Of two numbers of one size either may give the scale its sign: what is read back is alike.
        mine, theirs = kind.decode(pooled[:1, :, 0]), kind.decode(kind.encode(numbers))
        torch.testing.assert_close(mine.abs(), theirs.abs(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", NATIVE[:3], ids=lambda kind: kind.name)
@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_are_none_are_told(kind, odd):
    pool = new_pool(kind)
    keys, values = torch.zeros(1, KV_HEADS, K_DIM), torch.ones(1, KV_HEADS, V_DIM)
    keys[0, 1, 3] = odd
    table = np.zeros((1, 1), np.int32)
    largest = store_token(keys.numpy(), values.numpy(), pool.key_array, pool.value_array, table, 0)
    assert not largest <= 65504
    stored = pool.keys[0, 1, 0, 3].float()
    assert stored.isnan() if odd != odd else stored == odd


@pytest.mark.parametrize(("table", "position"), [([[0]], 4), ([[0]], -1), ([[6]], 0), ([[-1]], 3)])
def test_a_place_that_is_not_there_is_refused_and_nothing_is_written(table, position):
    pool = new_pool(storage.FP32)
    pool.keys.zero_()
    keys, values = np.ones((1, KV_HEADS, K_DIM), np.float32), np.ones((1, KV_HEADS, V_DIM), np.float32)
    with pytest.raises(IndexError, match=rf"position {position} must lie in the blocks of table"):
        store_token(keys, values, pool.key_array, pool.value_array, np.array(table, np.int32), position)
    assert not pool.keys.any()


def test_arrays_that_do_not_fit_together_are_refused():
    pool = new_pool(storage.FP32)
    keys, values = np.ones((1, KV_HEADS, K_DIM + 1), np.float32), np.ones((1, KV_HEADS, V_DIM), np.float32)
    with pytest.raises(ValueError, match="do not fit keys"):
        store_token(keys, values, pool.key_array, pool.value_array, np.zeros((1, 1), np.int32), 0)


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
@pytest.mark.parametrize("pair", [(storage.Q8_0, storage.Q8_0), (storage.FP16, storage.FP32)])
def test_numbers_that_are_none_are_told_of_both_types(pair, odd):
    pool = new_pool(*pair)
    keys, values = torch.zeros(1, KV_HEADS, K_DIM), torch.ones(1, KV_HEADS, V_DIM)
    values[0, 1, 3] = odd
    table = np.zeros((1, 1), np.int32)
    assert not store_token(keys.numpy(), values.numpy(), pool.key_array, pool.value_array, table, 0) <= 65504


def test_every_storage_type_is_stored_natively():
    for name in storage.names():
        assert stores(BlockPool(1, 1, 32, 32, 32, storage.get(name), 1).key_array.dtype)


@pytest.mark.parametrize("count", [2, 4])
def test_each_row_needs_a_position(count):
    new, pool = np.ones((3, 2, 8), np.float32), np.zeros((3, 2, 4, 8), np.float32)
    with pytest.raises(ValueError, match=rf"positions \({count},\) do not fit a table of 3 rows"):
        store_tokens(new, new, pool, pool.copy(), np.zeros((3, 1), np.int32), np.zeros(count, np.int64))


def test_rows_may_be_tokens_of_one_sequence():
    generator = np.random.default_rng(3)
    new = [generator.standard_normal((5, 2, 8)).astype(np.float32) for _ in range(2)]
    pools = [np.zeros((3, 2, 4, 8), np.float32) for _ in range(2)]
    store_tokens(*new, *pools, np.array([[2, 0, 1]] * 5, np.int32), np.array([2, 3, 4, -1, 8]))
    places = [(2, 2), (2, 3), (0, 0), None, (1, 0)]
    for pool, tokens in zip(pools, new, strict=True):
        stored = np.zeros_like(pool)
        for place, token in zip(places, tokens, strict=True):
            if place is not None:
                stored[place[0], :, place[1]] = token
        np.testing.assert_array_equal(pool, stored)
