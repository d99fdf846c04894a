"""Blocks of keys that queries match best, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_kv.cpu_ops import qk_tile
from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.cpu_ops.matched_blocks import matched_blocks
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.head_views import with_matched_blocks
from hetero_kv.families.sparse_prefill.key_lists import KeyBlocks, KeyLines, runs_of
from hetero_kv.gpu_ops.chosen_keys import best_matched_blocks
from tests.support.slow_variants import with_slow

SCALE = 0.1
LINES = KeyLines.of(np.array([3, 90, 91]), np.array([70]))


def problem(past, n, heads=3, dtype=torch.float32, dim=16):
    generator = torch.Generator().manual_seed(0)
    # Whole numbers that bfloat16 holds.
    numbers = [torch.randint(-5, 6, (*shape, dim), generator=generator) for shape in ((heads, n), (past + n,))]
    q, k = (each.to(dtype) for each in numbers)
    return q, k[:past], k[past:]


def reference(q, past_k, k, runs, starts, softcap):
    """[heads, blocks, key blocks]: the largest attention of a key block, outside the runs, by every sixteenth query."""
    past, n, total = len(past_k), len(k), len(past_k) + len(k)
    blocks, key_blocks = -(-n // QUERY_BLOCK), -(-total // QUERY_BLOCK)
    found = torch.zeros(len(q), blocks, key_blocks)
    for head in range(len(q)):
        for block in range(blocks):
            free = torch.ones(total)
            for first, stop in runs[starts[head * blocks + block] : starts[head * blocks + block + 1]]:
                free[first:stop] = 0
            for at in {min(block * QUERY_BLOCK + each, n - 1) for each in (15, 31, 47, 63)}:
                scores = torch.cat([past_k, k])[: past + at + 1].float() @ q[head, at].float() * SCALE
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                weights = scores.softmax(0) * free[: past + at + 1]
                sums = torch.stack([part.sum() for part in weights.split(QUERY_BLOCK)])
                found[head, block, : len(sums)] = torch.maximum(found[head, block, : len(sums)], sums)
    return found


# Keys are multiplied in place if they fill tiles (64 numbers), else while they are gathered.
@pytest.mark.parametrize(
    ("dtype", "dim", "softcap"),
    with_slow(
        [
            (torch.float32, 16, None),
            (torch.float32, 16, 5.0),
            (torch.float32, 20, None),
            (torch.bfloat16, 16, 5.0),
            (torch.bfloat16, 64, None),
        ],
        # Models of other tests have the first one's kernel too.
        slow=[
            (torch.float32, 16, 5.0),
            (torch.float32, 20, None),
            (torch.bfloat16, 16, 5.0),
            (torch.bfloat16, 64, None),
        ],
    ),
)
@pytest.mark.parametrize(("past", "n"), [(0, 64), (333, 150), (700, 1), (64, 1200)])
def test_blocks_are_those_that_receive_most_from_a_few_queries(past, n, dtype, dim, softcap):
    q, past_k, k = problem(past, n, dtype=dtype, dim=dim)
    runs, starts = runs_of([LINES] * 3, past, n)
    expected = reference(q, past_k, k, runs, starts, softcap)
    _are_best(best_matched_blocks(q, past_k, k, runs, starts, 2, SCALE, softcap), expected)


@pytest.mark.skipif(not multiplies_by_tiles(), reason="this CPU has no tiles of bfloat16")
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_blocks_are_the_same_where_the_cpu_has_no_tiles(softcap, monkeypatch):
    q, past_k, k = problem(333, 150, dtype=torch.bfloat16, dim=64)
    runs, starts = runs_of([LINES] * 3, 333, 150)
    monkeypatch.setattr(qk_tile, "multiplies_by_tiles", lambda: False)
    found = best_matched_blocks(q, past_k, k, runs, starts, 2, SCALE, softcap)
    _are_best(found, reference(q, past_k, k, runs, starts, softcap))


def _are_best(found, expected):
    found = torch.from_numpy(found)
    assert found.shape == (*expected.shape[:2], 2)
    assert (found.diff(dim=2) >= 0).all()
    for each, shares in zip(found.flatten(0, 1), expected.flatten(0, 1), strict=True):
        there = shares[shares > 0].sort(descending=True).values[:2]
        # Of nearly equal ones either.
        torch.testing.assert_close(shares[each[each >= 0].long()].sort(descending=True).values, there)


def test_any_number_of_threads_finds_the_same():
    q, past_k, k = (each.numpy() for each in problem(300, 150, heads=8))
    runs, starts = runs_of([LINES] * 8, 300, 150)
    one, two = (matched_blocks(q, past_k, k, runs, starts, SCALE, 5.0, threads=threads) for threads in (1, 2))
    assert np.array_equal(one, two)
    assert one.any()
    # Heads of a model's queries lie apart, token by token.
    apart = np.ascontiguousarray(q.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert np.array_equal(matched_blocks(apart, past_k, k, runs, starts, SCALE, 5.0), one)


def test_arrays_of_wrong_shapes_are_refused():
    q, past, k = np.zeros((1, 70, 16), np.float32), np.zeros((9, 16), np.float32), np.zeros((70, 16), np.float32)
    runs, starts = np.array([[0, 64], [0, 70]], np.int32), np.array([0, 1, 2])
    matched_blocks(q, past, k, runs, starts, SCALE, 5.0)
    for arguments in (
        (q[:, :64], past, k, runs, starts),
        (q[:, :, :8], past, k, runs, starts),
        (q, past[:, :8], k, runs, starts),
        (q[:0], past, k, runs, starts),
        (q, past, k, runs, starts[:2]),
        (q, past, k, runs, starts + 1),
        (q, past, k, runs, starts - 1),
        (q, past, k, runs, starts[[0, 2, 1]]),
        (q, past, k, runs + 10, starts),
        (q, past, k, runs - 1, starts),
        (*(np.zeros((*each.shape[:-1], 24), np.uint16) for each in (q, past, k)), runs, starts),
    ):
        with pytest.raises(ValueError, match=r"fit|lie within|must be a multiple|are not those of"):
            matched_blocks(*arguments, SCALE)
    with pytest.raises(ValueError, match="scale is 0"):
        matched_blocks(q, past, k, runs, starts, 0.0)
    for arguments in ((q, past, k.astype(np.float64)), [each.astype(np.float64) for each in (q, past, k)]):
        with pytest.raises(TypeError, match="must be float32, or bits"):
            matched_blocks(*arguments, runs, starts, SCALE)


def test_a_sentence_that_stands_twice_sees_itself():
    """Queries in the middle of a chunk attend to the same words of before, which no line or distance shows."""
    generator = torch.Generator().manual_seed(1)
    past, n, heads = 1000, 512, 4
    q = torch.randn(1, heads, n, 16, generator=generator) / 2
    k, v = (torch.randn(1, 2, past + n, 16, generator=generator) for _ in range(2))
    k = 4 * torch.nn.functional.normalize(k, dim=3)
    # Of head 2 forty queries are turned to as many keys, ten of these in the next block of keys.
    q[0, 2, 200:240] = 4 * k[0, 1, 290:330]
    # A soft cap that no score comes near, whose kernel the tests above have compiled.
    chunk = Chunk(q, k[:, :, :past], v[:, :, :past], k[:, :, past:], v[:, :, past:], 0.5, 1e4)
    chosen = KeyBlocks(np.ones((8, 24), bool))
    keys = [LINES, chosen, LINES, LINES]
    found = with_matched_blocks(chunk, keys, 2)
    assert found[1] is chosen
    assert [each.blocks.shape for each in (found[0], found[2], found[3])] == [(8, 2)] * 3
    assert found[2].blocks[3].tolist() == [4, 5]
    exact = chunk.attention([chosen] * 4)[0][0]
    without, with_them = (chunk.attention(each)[0][0] for each in (keys, found))
    off = [(each[2, 200:240] - exact[2, 200:240]).norm() / exact[2, 200:240].norm() for each in (without, with_them)]
    assert off[0] > 0.5
    assert off[1] < 0.05
