"""The part of a call that belongs to one equal-length group, and snapshots of a batch for rollbacks."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.engine.equal_length_group import EqualLengthGroup, GroupSnapshot
from hetero_kv.engine.padding_mask import PaddingMask


@dataclass(frozen=True)
class BatchSnapshot:
    """The state of a `Batch` that `Batch.rollback` restores."""

    groups: tuple[EqualLengthGroup, ...]
    states: tuple[GroupSnapshot, ...]
    columns: PaddingMask


@dataclass(frozen=True)
class BatchSlice:
    """New tokens of one group in a call of the model.

    Attributes:
        rows: the group's rows in the batch.
        columns: the columns of the call that hold the new tokens.
    """

    group: EqualLengthGroup
    rows: slice
    columns: slice

    @property
    def tokens(self) -> int:
        """New tokens of each row."""
        return self.columns.stop - self.columns.start
