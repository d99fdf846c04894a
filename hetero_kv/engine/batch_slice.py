"""The part of a call that belongs to one equal-length group, and snapshots of a batch for rollbacks."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.engine.equal_length_group import EqualLengthGroup, GroupSnapshot
from hetero_kv.engine.padding_mask import PaddingMask
from hetero_kv.engine.step import PromptPart


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
        part: for tokens of a prompt that are computed as rows of one column, which part of it they are; else None.
        is_draft: whether the rows are consecutive tokens of the group's one sequence, each of which is decoded.
    """

    group: EqualLengthGroup
    rows: slice
    columns: slice
    part: PromptPart | None = None
    is_draft: bool = False

    @property
    def tokens(self) -> int:
        """New tokens of each sequence."""
        tokens = self.columns if self.part is None and not self.is_draft else self.rows
        return tokens.stop - tokens.start

    @property
    def is_decoded(self) -> bool:
        """Whether its tokens are generated or drafted."""
        return self.part is None and (self.is_draft or self.tokens == 1)
