"""How many chosen chunks were in no slot, counted where the model computes until somebody asks."""

from __future__ import annotations

from typing import Any

import torch

from gpu_ops.host_copies import on_host
from hetero_kv.store.growing_tensor import GrowingTensor

# Steps that the log grows by.
_SLACK = 256
#: Steps that are not told from one turn to the next: 16 KB a head.
MOST_UNTOLD = 4096


class MissedChunks:
    """A row for each step, of each sequence's heads. A step's row is written behind those of the steps before, so that
    going back is forgetting the last rows."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._steps = GrowingTensor(0, _SLACK)
        # Of how many sequences the first steps were, for each number that there was before the present one.
        self._rows_before: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self._steps)

    def row(self, heads: int, device: torch.device) -> torch.Tensor:
        """The next step's, to be written by whoever finds out: [heads] int32."""
        return self._steps.room(torch.empty(0, heads, dtype=torch.int32, device=device), 1)[0]

    def taken(self, rows: int) -> list[tuple[int, int]]:
        """What each step has missed, of all heads, and of how many sequences; it is forgotten here.

        Waits for the device where there are any.

        Args:
            rows: sequences now.
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
        """Go on with so many sequences, of `before`."""
        if len(self._steps):
            total = self._steps.entries.sum(dim=1, keepdim=True, dtype=torch.int32)
            heads = self._steps.entries.shape[1] // before
            self._steps.replace(torch.nn.functional.pad(total, (0, rows * heads - 1)))
            self._rows_before = (*self._rows_before, (len(self._steps), before))

    def checkpoint(self) -> tuple[Any, ...]:
        """What `restore` needs to come back to the present steps."""
        return self._steps, self._steps.checkpoint(), self._rows_before

    def restore(self, checkpoint: tuple[Any, ...]) -> None:
        """Come back to the steps at `checkpoint`."""
        self._steps, held, self._rows_before = checkpoint
        self._steps.restore(held)

    def fork(self) -> MissedChunks:
        """A second log with the same steps."""
        twin = MissedChunks()
        twin._steps, twin._rows_before = self._steps.fork(), self._rows_before
        return twin

    @property
    def nbytes(self) -> int:
        """Memory of the log, bytes."""
        return self._steps.nbytes
