"""Key lists of query blocks: from ranked tokens and distances, or from key blocks, combined head by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK, ranges_of, runs_of_heads
from hetero_kv.cpu_ops.threads import at_most

#: The first tokens, and the nearest distances, that every head attends to.
ALWAYS_FIRST, ALWAYS_NEAR = QUERY_BLOCK, QUERY_BLOCK


@dataclass(frozen=True)
class KeyLines:
    """Keys of one head: tokens and distances that are the same for all queries, plus key blocks per query block.

    Attributes:
        tokens: [lines, 2] int32, [first, stop), in order and without overlap.
        distances: [bands, 2] int32, likewise.
        blocks: [query blocks, count] int32, key blocks, ascending, filled up with -1; None: none at all.
    """

    tokens: np.ndarray
    distances: np.ndarray
    blocks: np.ndarray | None = None

    @classmethod
    def of(cls, tokens: np.ndarray, distances: np.ndarray) -> KeyLines:
        """From tokens and distances in any order, plus those that every head attends to."""
        return cls(ranges_of(tokens, ALWAYS_FIRST), ranges_of(distances, ALWAYS_NEAR))


@dataclass(frozen=True)
class KeyBlocks:
    """Keys of one head as key blocks per query block, [query blocks, key blocks] bool."""

    chosen: np.ndarray

    def as_lines(self) -> KeyLines:
        """The same keys as `KeyLines` without tokens or distances."""
        numbers = np.where(self.chosen, np.arange(self.chosen.shape[1], dtype=np.int32), np.int32(-1))
        none, most = np.empty((0, 2), np.int32), int(self.chosen.sum(axis=1).max(initial=0))
        return KeyLines(none, none, np.sort(numbers, axis=1)[:, numbers.shape[1] - most :])


def runs_of(heads: Sequence[KeyLines | KeyBlocks], past: int, n: int, whole: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Runs of a chunk of n tokens after `past`, in the form that `attend_runs` takes.

    heads: the keys of all rows' heads in turn.
    whole: the number of last queries that attend to all keys; the rest of their query blocks does so too.
    """
    lines = [head if isinstance(head, KeyLines) else head.as_lines() for head in heads]
    sparse = (n - min(whole, n)) // QUERY_BLOCK if whole else None
    return runs_of_heads(
        [head.tokens for head in lines], [head.distances for head in lines], [head.blocks for head in lines], past, n,
        sparse, at_most(torch.get_num_threads()),
    )  # fmt: skip
