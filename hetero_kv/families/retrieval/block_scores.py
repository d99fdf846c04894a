"""From per-head scores of blocks to the blocks that are attended to."""

from __future__ import annotations

import numpy as np

from cpu_ops.chosen_blocks import best_blocks
from cpu_ops.top_k import top_k_blocks


def select_blocks(
    scores: np.ndarray, count: int, shared: bool, group_reduce: str = "mean", allowed: np.ndarray | None = None
) -> np.ndarray:
    """The positions of the `count` best blocks, ascending; ties go to the earlier block.

    A kv head's score is the mean (or the maximum) over its group's queries; when `shared`, all kv heads are summed and
    choose together.

    Args:
        scores: [rows, kv_heads, group, blocks] float32, of the queries against the blocks' representatives.
        count: blocks to choose, at most `blocks`, or what is allowed.
        shared: one choice for all kv heads (SHARED), or each its own (SEPARATE).
        group_reduce: "mean" or "max".
        allowed: [rows, lists, n] positions that may be chosen; None for all.

    Returns [rows, 1, count] int32 when shared, else [rows, kv_heads, count].
    """
    if allowed is None:
        return best_blocks(np.ascontiguousarray(scores), count, shared, group_reduce == "max")
    per_head = scores.mean(axis=2) if group_reduce == "mean" else scores.max(axis=2)
    if shared:
        per_head = per_head.sum(axis=1, keepdims=True)
    masked = np.full_like(per_head, -np.inf)
    np.put_along_axis(masked, allowed, np.take_along_axis(per_head, allowed, axis=2), axis=2)
    rows, lists, blocks = masked.shape
    flat = np.ascontiguousarray(masked.reshape(rows * lists, blocks))
    positions, _ = top_k_blocks(flat, np.full(rows * lists, blocks, dtype=np.int32), count)
    return positions.reshape(rows, lists, count)
