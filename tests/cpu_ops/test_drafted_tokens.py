"""Consecutive tokens of a long sequence share a reading of it, and are attended to as one by one."""

import numpy as np
import pytest
import torch

from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep, StepPool
from hetero_kv.cpu_ops.step_contract import CAUSAL, EVERYTHING, LONG, NOTHING_FORBIDDEN
from tests.cpu_ops.test_retrieval_step import BLOCK, DIM, GROUP, KV_HEADS


def attended_together_and_apart(position, tokens, others, dtype, storage):
    """Outputs, log-sum-exps and pools of two steps: one whose drafts share a reading, and one without."""
    rng = np.random.default_rng(0)
    rows, blocks = tokens + others, (LONG + 8 + tokens) // BLOCK
    shape = (2 * blocks, KV_HEADS, BLOCK, DIM)
    pools = [torch.from_numpy(rng.standard_normal(shape, np.float32)).bfloat16() for _ in "kv"]
    heads = KV_HEADS * GROUP, KV_HEADS, KV_HEADS
    inputs = [torch.from_numpy(rng.standard_normal((rows, each, 1, DIM), np.float32)).bfloat16() for each in heads]
    inputs = [(each.float() if dtype is np.float32 else each.view(torch.uint16)).numpy() for each in inputs]
    table = np.full((rows, blocks), -1, np.int32)
    own, places = slice(others // 2, others // 2 + tokens), np.full(rows, 5)
    places[own] = position + np.arange(tokens)
    order = rng.permutation(2 * blocks)
    for row, place in enumerate(places):
        first = 0 if own.start <= row < own.stop else blocks + 2 * row
        table[row, : place // BLOCK + 1] = order[first : first + place // BLOCK + 1]
    for together in (True, False):
        keys, values = (each.float().numpy().astype(storage) for each in pools)
        lengths = np.full(2 * blocks, BLOCK, np.int32)
        # The step writes lengths of blocks of drafts; those of other rows' last blocks are the caller's.
        alone = [row for row in range(rows) if not own.start <= row < own.stop]
        lengths[table[alone, 5 // BLOCK]] = 5 % BLOCK + 1
        pool = StepPool(keys, values, np.zeros((2 * blocks, KV_HEADS, 2, DIM), np.float32), lengths)
        step = RetrievalStep(pool, GROUP, "dot", False, dtype, 2, shares_readings=together)
        assert (step._calls[CAUSAL] != 0) == together
        out, lse = np.empty(inputs[0].shape, dtype), np.empty((rows, KV_HEADS, GROUP), np.float32)
        ranges = np.array([places, np.zeros(rows, np.int64), np.zeros(rows, np.int64)])
        nothing = NOTHING_FORBIDDEN, NOTHING_FORBIDDEN, True
        step(*inputs, ranges, table, EVERYTHING, *nothing, 0.25, 0.0, out, lse)
        yield out, lse, keys, values, lengths


@pytest.mark.parametrize("position", [LONG - 3, LONG, LONG + 1])
@pytest.mark.parametrize("others", [0, 2])
def test_consecutive_tokens_of_a_long_sequence_are_attended_to_as_one_by_one(position, others):
    """Others: rows of other sequences, before and after them."""
    for joint, apart in zip(*attended_together_and_apart(position, 6, others, np.float32, np.float32), strict=True):
        np.testing.assert_allclose(joint, apart, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not multiplies_by_tiles(), reason="this CPU has no tiles of bfloat16")
def test_tiles_attend_to_consecutive_tokens_as_precisely_as_to_one():
    joint, apart = attended_together_and_apart(LONG, 8, 0, np.uint16, np.float16)
    np.testing.assert_allclose(joint[1], apart[1], rtol=1e-5)
    # Outputs are rounded to bfloat16. If weights were, too, four of ten would differ.
    assert (joint[0] != apart[0]).mean() < 0.02
