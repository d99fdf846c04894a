"""Counts chosen chunks that were in no slot, on the compute device, until the counts are read."""

from __future__ import annotations

from typing import Any

import torch

from hetero_kv.gpu_ops.host_copies import on_host
from hetero_kv.store.growing_tensor import GrowingTensor

# Spare steps of the log whenever it grows.
_SLACK = 256
#: Most steps that stay unread from one turn to the next: 16 KB per head.
MAX_UNREAD = 4096


class MissedChunks:
    """A log with one row per step and one column per head of each sequence. Rows are appended, so that a rollback
    removes the last rows."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._steps = GrowingTensor(0, _SLACK)
        # For each earlier number of sequences: the step at which it ended, and the number.
        self._rows_before: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self._steps)

    def row(self, heads: int, device: torch.device) -> torch.Tensor:
        """Returns the next step's row, [heads] int32, for the caller to fill."""
        return self._steps.room(torch.empty(0, heads, dtype=torch.int32, device=device), 1)[0]

    def pop_misses(self, rows: int) -> list[tuple[int, int]]:
        """Returns each step's misses, over all heads, with its number of sequences; clears the log.

        Waits for the device if the log is not empty.

        Args:
            rows: the present number of sequences.
        """
        if not len(self._steps):
            return []
        (by_row,) = on_host(self._steps.entries.sum(dim=1))
        by_step: list[int] = by_row.tolist()
        of_rows, start = [], 0
        for stop, count in (*self._rows_before, (len(by_step), rows)):
            of_rows += [(missed, count) for missed in by_step[start:stop]]
            start = max(start, stop)
        self._forget()
        return of_rows

    def select(self, before: int, rows: int) -> None:
        """Continue with `rows` sequences, where there were `before`."""
        if len(self._steps):
            total = self._steps.entries.sum(dim=1, keepdim=True, dtype=torch.int32)
            heads = self._steps.entries.shape[1] // before
            self._steps.replace(torch.nn.functional.pad(total, (0, rows * heads - 1)))
            self._rows_before = (*self._rows_before, (len(self._steps), before))

    def checkpoint(self) -> tuple[Any, ...]:
        """Returns the state that `restore` takes to return to the present steps."""
        return self._steps, self._steps.checkpoint(), self._rows_before

    def restore(self, checkpoint: tuple[Any, ...]) -> None:
        """Return to the steps at `checkpoint`."""
        self._steps, checkpointed, self._rows_before = checkpoint
        self._steps.restore(checkpointed)

    def fork(self) -> MissedChunks:
        """Returns a second log with the same steps."""
        forked = MissedChunks()
        forked._steps, forked._rows_before = self._steps.fork(), self._rows_before
        return forked

    @property
    def nbytes(self) -> int:
        """Memory of the log, bytes."""
        return self._steps.nbytes
