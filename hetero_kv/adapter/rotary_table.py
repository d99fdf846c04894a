"""The rotation of every position of a sequence, as the model's layers received it; one table serves many layers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hetero_kv.adapter.rotation import Rotation
from hetero_kv.errors import HeteroKVError
from hetero_kv.store.growing_tensor import GrowingTensor

SLACK = 512


class RotaryTable:
    """cos and sin of positions 0 to `len`, one number per pair of channels, in the dtype that the model rotates with.

    Kept as received and not computed anew: a model may change its frequencies as a sequence grows (dynamic scaling),
    and only the numbers that keys were rotated with undo their rotation.
    """

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        self._cos, self._sin = GrowingTensor(0, SLACK), GrowingTensor(0, SLACK)
        # What was recorded last. Held, so that nothing else comes to lie at its address: layers that are given the
        # same memory have the same rotation.
        self._source: torch.Tensor | None = None
        self._recorded = 0

    def __len__(self) -> int:
        return len(self._cos)

    def record(self, cos: torch.Tensor, sin: torch.Tensor, start: int) -> bool:
        """Take the rotation of the positions from `start` on; False when the table holds another one for them.

        Args:
            cos, sin: [1 or batch, tokens, width], the model's `position_embeddings`.

        Raises HeteroKVError when the rows of a batch are at different positions.
        """
        stop = start + cos.shape[1]
        if not self.is_source(cos):
            if cos.shape[0] > 1 and not torch.equal(cos, cos[:1].expand_as(cos)):
                raise HeteroKVError(
                    "the sequences of this batch are at different positions; an operator that undoes the rotation of "
                    "keys takes batches whose prompts have equal length: group them by length, or run them one by one"
                )
            self._source, self._recorded = cos, start
        if stop <= self._recorded:
            return True
        # An interrupt may have come between the two.
        whole = min(len(self._cos), len(self._sin))
        for table in (self._cos, self._sin):
            if len(table) > whole:
                table.truncate(whole)
        new = [self.rotation.angles(part[0]) for part in (cos, sin)]
        known = min(stop, len(self)) - start
        for table, rows in zip((self._cos, self._sin), new, strict=True):
            if known > 0 and not torch.equal(table.entries[start : start + known], rows[:known]):
                self._source = None
                return False
        for table, rows in zip((self._cos, self._sin), new, strict=True):
            table.append(rows[max(0, known) :])
        self._recorded = stop
        return True

    def is_source(self, cos: torch.Tensor) -> bool:
        """Whether `cos` lies in the same memory as what was recorded last."""
        source = self._source
        return source is not None and source.untyped_storage().data_ptr() == cos.untyped_storage().data_ptr()

    def until(self, length: int) -> RotaryTable:
        """A table of its own with the first `length` positions of this one."""
        twin = RotaryTable(self.rotation)
        if length:
            twin._cos.append(self._cos.entries[:length])
            twin._sin.append(self._sin.entries[:length])
        return twin

    @property
    def cos(self) -> torch.Tensor:
        """[positions, pairs], a view."""
        return self._cos.entries

    @property
    def sin(self) -> torch.Tensor:
        """[positions, pairs], a view."""
        return self._sin.entries

    @property
    def nbytes(self) -> int:
        """Memory of the table, bytes."""
        return self._cos.nbytes + self._sin.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> RotaryTable:
        memo[id(self)] = twin = copy.copy(self)
        twin._cos, twin._sin, twin._source = self._cos.fork(), self._sin.fork(), None
        return twin
