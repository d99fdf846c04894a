"""Native block selection equals numpy's reductions and top-k."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.chosen_blocks import attended_ids, best_blocks
from hetero_kv.cpu_ops.step_contract import NOTHING_FORBIDDEN
from hetero_kv.cpu_ops.top_k import top_k_blocks


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    blocks=st.integers(1, 40),
    share=st.floats(0, 1),
    shared=st.booleans(),
    largest=st.booleans(),
    coarse=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_best_blocks_are_those_of_the_reduced_scores(
    rows, kv_heads, group, blocks, share, shared, largest, coarse, seed
):
    scores = np.random.default_rng(seed).standard_normal((rows, kv_heads, group, blocks)).astype(np.float32)
    # Coarse scores tie.
    scores = np.round(scores) if coarse else scores
    count = max(1, int(share * blocks))
    reduced = scores.max(axis=2) if largest else scores.mean(axis=2)
    reduced = reduced.sum(axis=1, keepdims=True) if shared else reduced
    flat = np.ascontiguousarray(reduced.reshape(-1, blocks))
    expected, _ = top_k_blocks(flat, np.full(len(flat), blocks, np.int32), count)
    assert (
        best_blocks(scores, count, NOTHING_FORBIDDEN, shared, largest).reshape(len(flat), count).tolist()
        == expected.tolist()
    )


@settings(deadline=None)
@given(first=st.integers(0, 4), context=st.integers(0, 9), after=st.integers(0, 4), lists=st.integers(1, 3))
def test_attended_ids_are_the_initial_chosen_and_local_blocks(first, context, after, lists):
    blocks, end = first + context + after, first + context
    table = np.arange(100, 100 + 2 * blocks, dtype=np.int32).reshape(2, blocks)
    positions = np.stack(
        [np.sort(np.random.default_rng(seed).permutation(context)[: context // 2]) for seed in range(2 * lists)]
    ).astype(np.int32)
    firsts, ends = np.full(2, first), np.full(2, end)
    ids, counts = attended_ids(table, positions.reshape(2, lists, -1), firsts, ends)
    for row in range(2):
        for each in range(lists):
            chosen = table[row, first:end][positions[row * lists + each]]
            assert ids[row, each, : counts[row, each]].tolist() == [*table[row, :first], *chosen, *table[row, end:]]
