"""Attention to chosen keys equals the masked softmax formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops import run_attention, run_attention_tiles
from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.block_means import block_means as key_block_means
from hetero_kv.cpu_ops.cpu_features import has
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK, ranges_of, runs_of_heads
from hetero_kv.cpu_ops.row_maximum import row_max
from hetero_kv.cpu_ops.run_attention import attend_runs, runs_in_bfloat16
from hetero_kv.cpu_ops.run_attention_tiles import attend_by_tiles
from hetero_kv.gpu_ops.attention import chunk_attention
from hetero_kv.gpu_ops.chosen_keys import block_means, chosen_attention
from tests.cpu_ops.rounded_attention import attention_and_bound
from tests.support.slow_variants import with_few

SCALE = 0.3
BITS = pytest.mark.skipif(not has("avx512bf16"), reason="this CPU has no dot products of bfloat16")
#: (dtype, k_dim, v_dim, softcap): one kernel each.
KERNELS = [
    (torch.float32, 16, 16, None),
    # As a test of matched blocks attends.
    (torch.float32, 16, 16, 3.0),
    pytest.param(torch.bfloat16, 16, 16, None, marks=BITS),
    pytest.param(torch.bfloat16, 32, 80, 3.0, marks=BITS),
    pytest.param(torch.bfloat16, 64, 64, None, marks=BITS),
    pytest.param(torch.float32, 24, 12, 3.0, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", autouse=True)
def turned():
    """Have values turned however few queries attend to them, which chunks of these tests are too short for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_attention_tiles, "_TRANSPOSED_FROM", 0)
        yield


def problem(dtype, batch, kv_heads, group, past, n, k_dim, v_dim, seed):
    """q, past keys and values, keys and values of the chunk, as a model lays them out: a chunk by token, then head."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, n, kv_heads * group, k_dim, generator=generator).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, past + n, dim, generator=generator).to(dtype) for dim in (k_dim, v_dim))
    own = (each[:, :, past:].transpose(1, 2).contiguous().transpose(1, 2) for each in (k, v))
    # In buffers with room behind the last token.
    buffers = [torch.full((batch, kv_heads, past + 40, dim), torch.nan, dtype=dtype) for dim in (k_dim, v_dim)]
    for buffer, each in zip(buffers, (k, v), strict=True):
        buffer[:, :, :past] = each[:, :, :past]
    return q, *(buffer[:, :, :past] for buffer in buffers), *own


def seen_by(runs, starts, lists, past, n):
    """Which tokens each query sees: [lists, n, past + n] bool."""
    blocks = -(-n // QUERY_BLOCK)
    seen = torch.zeros(lists, n, past + n, dtype=torch.bool)
    for item in range(lists * blocks):
        rows = slice(item % blocks * QUERY_BLOCK, (item % blocks + 1) * QUERY_BLOCK)
        for first, stop in runs[starts[item] : starts[item + 1]]:
            seen[item // blocks, rows, first:stop] = True
    return seen & (torch.arange(past + n)[None] <= torch.arange(past, past + n)[:, None])


def reference(q, past_k, past_v, k, v, seen, softcap):
    """Attention, its log-sum-exp and, in bfloat16, its bound (`attention_and_bound`)."""
    keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    return attention_and_bound(q, keys, values, seen.view(*q.shape[:3], -1), SCALE, softcap or 0.0)


def random_runs(rng, lists, past, n, share):
    """Runs of `lists` heads whose key blocks are chosen at random, some of them as lines."""
    none, columns, bands, besides = np.empty((0, 2), np.int32), [], [], []
    for each in range(lists):
        if each % 2:
            lines = np.flatnonzero(rng.random(past + n) < share)
            columns.append(np.stack([lines, lines + 1], 1))
            bands.append(np.array([[0, 9], [70, 71], [90, 140]]))
            besides.append(None)
        else:
            chosen = rng.random((-(-n // QUERY_BLOCK), -(-(past + n) // QUERY_BLOCK))) < share
            columns.append(none)
            bands.append(none)
            besides.append(np.sort(np.where(chosen, np.arange(chosen.shape[1]), -1), axis=1))
    return runs_of_heads(columns, bands, besides, past, n)


@pytest.mark.parametrize(("dtype", "k_dim", "v_dim", "softcap"), KERNELS)
@pytest.mark.parametrize(("batch", "past", "n", "share"), [(2, 333, 150, 0.3), (1, 0, 64, 0.5), (1, 200, 1, 0.0)])
def test_a_chunk_attends_to_its_runs(dtype, k_dim, v_dim, softcap, batch, past, n, share):
    kv_heads, group = 2, 2
    tensors = problem(dtype, batch, kv_heads, group, past, n, k_dim, v_dim, 3)
    runs, starts = random_runs(np.random.default_rng(5), batch * kv_heads * group, past, n, share)
    out, lse = chosen_attention(*tensors, runs, starts, SCALE, softcap)
    seen = seen_by(runs, starts, batch * kv_heads * group, past, n)
    expected, expected_lse, bound = reference(*tensors, seen, softcap)
    assert out.dtype is dtype
    allowed = 1e-5 if dtype is torch.float32 else bound
    assert bool(((out.double() - expected).abs() <= allowed).all())
    assert (lse.double() - expected_lse).abs().max() < 1e-5


@pytest.mark.parametrize(("dtype", "k_dim", "v_dim", "softcap"), KERNELS[::2])
@pytest.mark.parametrize("rise", [0.01, 0.3])
def test_scores_may_rise_from_token_to_token(dtype, k_dim, v_dim, softcap, rise):
    """By less than sums are rescaled for, and so far that weights above the first tokens' would be infinite."""
    q, past_k, past_v, k, v = problem(dtype, 1, 1, 2, 700, 50, k_dim, v_dim, 3)
    q[..., 0], past_k[..., 0], k[..., 0] = rise / SCALE, torch.arange(700), torch.arange(700, 750)
    runs, starts = np.array([[0, 750], [0, 750]]), np.arange(3)
    out, lse = chosen_attention(q, past_k, past_v, k, v, runs, starts, SCALE, softcap)
    expected, expected_lse, bound = reference(q, past_k, past_v, k, v, seen_by(runs, starts, 2, 700, 50), softcap)
    allowed = 1e-4 if dtype is torch.float32 else bound
    assert bool(((out.double() - expected).abs() <= allowed).all())
    assert (lse.double() - expected_lse).abs().max() < 1e-3


@pytest.mark.parametrize(("dtype", "k_dim", "v_dim", "softcap"), KERNELS[::2])
def test_a_single_token_next_to_a_range_hides_no_later_token(dtype, k_dim, v_dim, softcap):
    """It may be attended to behind them, and is before all of them."""
    tensors = problem(dtype, 1, 1, 4, 64, 64, k_dim, v_dim, 3)
    runs, starts = np.tile([[3, 4], [64, 128]], (4, 1)), np.arange(0, 9, 2)
    out, _ = chosen_attention(*tensors, runs, starts, SCALE, softcap)
    expected, _, bound = reference(*tensors, seen_by(runs, starts, 4, 64, 64), softcap)
    allowed = 1e-5 if dtype is torch.float32 else bound
    assert bool(((out.double() - expected).abs() <= allowed).all())


@pytest.mark.skipif(not multiplies_by_tiles(), reason="this CPU has no tiles of bfloat16")
def test_values_are_turned_for_some_kv_heads_at_a_time_or_none(monkeypatch):
    tensors = problem(torch.bfloat16, 2, 3, 2, 100, 150, 64, 64, 3)
    runs, starts = random_runs(np.random.default_rng(5), 12, 100, 150, 0.5)
    together = chosen_attention(*tensors, runs, starts, SCALE)
    head_bytes = 250 // 32 * 32 * 64 * 2
    assert 6 * head_bytes <= run_attention_tiles._TRANSPOSED_BYTES
    for room in (0, 2 * head_bytes):
        monkeypatch.setattr(run_attention_tiles, "_TRANSPOSED_BYTES", room)
        assert all(map(torch.equal, together, chosen_attention(*tensors, runs, starts, SCALE)))
    # Tokens come in another order then.
    monkeypatch.setattr(run_attention_tiles, "_TRANSPOSED_FROM", 1000)
    out, lse = chosen_attention(*tensors, runs, starts, SCALE)
    assert (out - together[0]).abs().max() <= 2**-7 * out.abs().max()
    assert (lse - together[1]).abs().max() < 1e-5


@pytest.mark.skipif(not multiplies_by_tiles(), reason="this CPU has no tiles of bfloat16")
@pytest.mark.parametrize(("past", "n", "share"), [(333, 150, 0.3), (0, 64, 0.5), (200, 1, 0.0)])
def test_dot_products_and_tiles_compute_the_same(monkeypatch, past, n, share):
    tensors = problem(torch.bfloat16, 1, 2, 2, past, n, 64, 64, 3)
    runs, starts = random_runs(np.random.default_rng(5), 4, past, n, share)
    calls: list[None] = []
    monkeypatch.setattr(run_attention, "attend_by_tiles", lambda *args: calls.append(attend_by_tiles(*args)))
    by_tiles = chosen_attention(*tensors, runs, starts, SCALE)
    assert len(calls) == 1
    monkeypatch.setattr(run_attention, "multiplies_by_tiles", lambda: False)
    by_dots = chosen_attention(*tensors, runs, starts, SCALE)
    assert len(calls) == 1
    assert (by_tiles[0] - by_dots[0]).abs().max() <= 2**-7 * by_dots[0].abs().max()
    assert (by_tiles[1] - by_dots[1]).abs().max() < 1e-5


@pytest.mark.skipif(not multiplies_by_tiles(), reason="this CPU has no tiles of bfloat16")
def test_torch_multiplies_by_its_own_tiles_behind_ours():
    """Its kernels keep the shapes of a thread's tiles from one call to the next."""
    left, right = (torch.randn(300, 300, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    tensors = problem(torch.bfloat16, 1, 2, 2, 70, 64, 16, 16, 3)
    runs, starts = random_runs(np.random.default_rng(5), 4, 70, 64, 0.3)
    before = left @ right
    for _ in range(2):
        chosen_attention(*tensors, runs, starts, SCALE)
        assert before.equal(left @ right)


@pytest.mark.parametrize(("dtype", "k_dim", "v_dim", "softcap"), KERNELS[::2])
def test_everything_chosen_is_dense_attention(dtype, k_dim, v_dim, softcap):
    past, n = 130, 200
    tensors = problem(dtype, 1, 2, 2, past, n, k_dim, v_dim, 1)
    none = np.empty((0, 2), np.int32)
    runs, starts = runs_of_heads([none] * 4, [none] * 4, [np.tile(np.arange(6), (4, 1))] * 4, past, n)
    out, lse = chosen_attention(*tensors, runs, starts, SCALE, softcap)
    dense, dense_lse = chunk_attention(*tensors, SCALE, softcap)
    allowed = 1e-5 if dtype is torch.float32 else 2**-7 * dense.abs().max()
    assert (out - dense).abs().max() <= allowed
    assert (lse - dense_lse).abs().max() < 1e-4


def test_any_number_of_threads_computes_the_same():
    q, *rest = (each.numpy() for each in problem(torch.float32, 1, 2, 2, 100, 150, 16, 16, 2))
    runs, starts = random_runs(np.random.default_rng(1), 4, 100, 150, 0.4)
    one, two = (attend_runs(q, *rest, runs, starts, SCALE, threads=threads) for threads in (1, 2))
    assert all(map(np.array_equal, one, two))


@settings(max_examples=60, deadline=None)
@given(past=st.integers(0, 300), n=st.integers(1, 200), seed=st.integers(0, 999), threads=st.integers(1, 2))
def test_a_blocks_queries_see_its_lines_bands_and_blocks(past, n, seed, threads):
    rng = np.random.default_rng(seed)
    heads, blocks = seed % 4 + 1, -(-n // QUERY_BLOCK)
    edges = [np.sort(rng.choice(past + n + 40, 2 * count, replace=False)).reshape(-1, 2) for count in range(heads)]
    bands = [np.sort(rng.choice(past + n + 40, 4, replace=False)).reshape(2, 2) for _ in range(heads)]
    besides = [
        np.sort(rng.integers(-1, -(-(past + n) // QUERY_BLOCK), (blocks, count)), axis=1) if count else None
        for count in rng.integers(0, 4, heads)
    ]
    sparse = int(rng.integers(0, blocks + 1))
    runs, starts = runs_of_heads(edges, bands, besides, past, n, sparse, threads)
    if sparse == blocks:
        assert all(map(np.array_equal, runs_of_heads(edges, bands, besides, past, n), (runs, starts)))
    for head in range(heads):
        for block in range(blocks):
            own = range(past + block * QUERY_BLOCK, min(past + (block + 1) * QUERY_BLOCK, past + n))
            expected = {
                *own,
                *(token for first, stop in edges[head] for token in range(first, stop) if token < own.stop),
            }
            expected |= {
                query - away for query in own for band in bands[head] for away in range(*band) if away <= query
            }
            for each in [] if besides[head] is None else besides[head][block][besides[head][block] >= 0]:
                expected |= {token for token in range(each * QUERY_BLOCK, (each + 1) * QUERY_BLOCK) if token < own.stop}
            if block >= sparse:
                expected = {*range(own.stop)}
            item = head * blocks + block
            found = [token for first, stop in runs[starts[item] : starts[item + 1]] for token in range(first, stop)]
            assert found == sorted(expected)


def test_blocks_of_other_blocks_of_queries_are_refused():
    none = np.empty((0, 2), np.int32)
    with pytest.raises(ValueError, match="not those of 2 of queries"):
        runs_of_heads([none], [none], [np.zeros((3, 1), np.int32)], 0, 100)


@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.integers(0, 90), max_size=30), always=st.integers(0, 70))
def test_ranges_are_of_neighbours(numbers, always):
    found = ranges_of(np.array(numbers, np.int64), always)
    named = {*numbers, *range(always)}
    assert [number for first, stop in found for number in range(first, stop)] == sorted(named)
    assert all(stop not in named and first - 1 not in named for first, stop in found)
    assert found.dtype == np.int32


def test_runs_that_lack_the_own_tokens_or_overlap_are_refused():
    arrays = [each.numpy() for each in problem(torch.float32, 1, 1, 1, 100, 64, 16, 16, 0)]
    for runs in ([[0, 10]], [[0, 20], [10, 164]], [[0, 165]], [[100, 164], [0, 5]], [[-1, 164]]):
        with pytest.raises(ValueError, match="own tokens"):
            attend_runs(*arrays, np.array(runs), np.array([0, len(runs)]), SCALE)
    with pytest.raises(ValueError, match="1 blocks"):
        attend_runs(*arrays, np.array([[0, 164]]), np.array([0, 1, 1]), SCALE)
    with pytest.raises(ValueError, match="scale"):
        attend_runs(*arrays, np.array([[0, 164]]), np.array([0, 1]), 0.0)
    with pytest.raises(TypeError, match="float32"):
        attend_runs(*(each.astype(np.float64) for each in arrays), np.array([[0, 164]]), np.array([0, 1]), SCALE)


@BITS
def test_bfloat16_wants_whole_vectors():
    assert not runs_in_bfloat16(24, 16)
    arrays = [np.zeros((1, 1, 4, 24), np.uint16) for _ in range(5)]
    with pytest.raises(ValueError, match="multiples of 16"):
        attend_runs(*arrays, np.array([[0, 8]]), np.array([0, 1]), SCALE)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 200), seed=st.integers(0, 99))
def test_the_largest_of_a_row_is_numpys(count, seed):
    rows = np.random.default_rng(seed).standard_normal((3, 200)).astype(np.float32)
    # Behind what is counted, and in the rows around it, lie larger ones.
    rows[1, count:], rows[::2] = 9, 9
    assert row_max(rows, 1, count) == rows[1, :count].max(initial=-np.inf)
    assert row_max(rows[:, 1:], 1, max(0, count - 1)) == rows[1, 1 : max(1, count)].max(initial=-np.inf)


@pytest.mark.parametrize("dtype", with_few([torch.float32, torch.bfloat16, torch.float16], quick=2))
@settings(max_examples=25, deadline=None)
@given(past=st.integers(0, 150), n=st.integers(0, 150), block=st.integers(1, 70), leading=st.integers(0, 2))
def test_means_of_blocks_across_past_and_chunk(dtype, past, n, block, leading):
    generator = torch.Generator().manual_seed(past)
    shape = (2, 3)[:leading]
    # As a model lays them out, by token and then head, and in a buffer with room behind the last token.
    buffer = torch.randn(*shape, past + 9, 5, generator=generator).to(dtype)
    old, new = buffer[..., :past, :], torch.randn(n, *shape, 5, generator=generator).to(dtype).movedim(0, -2)
    means = block_means(old, new, block)
    assert means.dtype is torch.float32
    assert means.shape == (*shape, -(-(past + n) // block), 5)
    if past + n:
        parts = torch.cat([old, new], -2).double().split(block, -2)
        assert torch.allclose(means.double(), torch.stack([part.mean(-2) for part in parts], -2), atol=1e-5)


def test_means_of_wrong_shapes_are_refused():
    past, new = np.zeros((1, 2, 5, 4), np.float32), np.zeros((1, 2, 3, 4), np.float32)
    for before, own, block in ((past[:, :1], new, 2), (past[..., :3], new, 2), (past, new, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            key_block_means(before, own, block)
    with pytest.raises(TypeError):
        key_block_means(past, new.astype(np.float64), 2)
