"""Lists of keys for blocks of queries: from ranked tokens and distances, and put together head by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpu_ops.key_runs import QUERY_BLOCK, block_runs, line_runs, ranges_of

#: First tokens, and nearest distances, that every head attends to.
ALWAYS_FIRST, ALWAYS_NEAR = QUERY_BLOCK, QUERY_BLOCK


@dataclass(frozen=True)
class Lines:
    """Keys of one head: the same tokens for all queries, and the same distances; for each block of them some blocks.

    Attributes:
        tokens: [lines, 2] int32, [first, stop), in order and apart.
        distances: [bands, 2] int32, likewise.
        blocks: [query blocks, count] int32, blocks of keys, ascending, -1 for none; None: none at all.
    """

    tokens: np.ndarray
    distances: np.ndarray
    blocks: np.ndarray | None = None

    @classmethod
    def of(cls, tokens: np.ndarray, distances: np.ndarray) -> Lines:
        """From numbers in any order, and what every head attends to."""
        return cls(ranges_of(tokens, ALWAYS_FIRST), ranges_of(distances, ALWAYS_NEAR))


@dataclass(frozen=True)
class Blocks:
    """Keys of one head: for each block of queries blocks of keys, [query blocks, key blocks] bool."""

    chosen: np.ndarray


def runs_of(heads: Sequence[Lines | Blocks], past: int, n: int, whole: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Runs of a chunk of n tokens behind `past`, as `attend_runs` takes them; `heads` are those of all rows in turn.

    whole: the chunk's last queries that attend to everything, with the others of their blocks.
    """
    blocks = -(-n // QUERY_BLOCK)
    sparse = (n - min(whole, n)) // QUERY_BLOCK if whole else blocks
    parts = [_ending_whole(*_runs_of_one(head, past, n), sparse, past, n) for head in heads]
    counts = np.concatenate([np.diff(starts) for _, starts in parts])
    starts = np.zeros(len(heads) * blocks + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return np.concatenate([runs for runs, _ in parts]), starts


def _runs_of_one(head: Lines | Blocks, past: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(head, Blocks):
        return block_runs(head.chosen, past, n)
    return line_runs(head.tokens, head.distances, past, n, head.blocks)


def _ending_whole(
    runs: np.ndarray, starts: np.ndarray, sparse: int, past: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The runs of one head, of which only the first `sparse` blocks of queries leave keys out."""
    blocks = len(starts) - 1
    if sparse == blocks:
        return runs, starts
    stops = past + np.minimum(QUERY_BLOCK * np.arange(sparse + 1, blocks + 1), n)
    everything = np.stack([np.zeros_like(stops), stops], axis=1).astype(runs.dtype)
    kept = starts[: sparse + 1]
    return np.concatenate([runs[: kept[-1]], everything]), np.concatenate([kept, kept[-1] + 1 + np.arange(len(stops))])
