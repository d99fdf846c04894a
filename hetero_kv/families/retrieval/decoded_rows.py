"""The rows whose tokens one native call decodes in a layer: those of one group, or of several in one pool."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hetero_kv.cpu_ops.step_contract import row_ranges
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.step_counts import DecodedGroups

_PADDING = -1
#: The position of a token that is stored already.
_STORED = -1


class GroupRows(NamedTuple):
    """The rows of one group in a step.

    Attributes:
        layer: the group's cache layer.
        step: the group's step.
        blocks: the layer's blocks in it.
        is_stored: whether the new token is in its block already.
    """

    layer: RetrievalLayer
    step: Step
    blocks: StepBlocks
    is_stored: bool

    @property
    def context_blocks(self) -> int:
        """The number of blocks in each row's Context, which ends at block `blocks.finalized`."""
        return max(0, self.blocks.finalized - self.layer.layout.sink_blocks)


class DecodedRows(NamedTuple):
    """Rows as `RetrievalStep` takes them.

    Attributes:
        table: [rows, blocks] int32, padded with -1; without attention sink and recent window if these are on a device.
        ranges: [3, rows] int64.
        groups: the groups of the rows.
    """

    table: np.ndarray
    ranges: np.ndarray
    groups: DecodedGroups

    @classmethod
    def of(cls, groups: list[GroupRows], covering: int | None) -> DecodedRows:
        """Rows of several groups, in the order of the batch; computed once for all layers of a forward.

        All of them are stored, or none. covering: up to so many blocks a Context is attended to as a whole; None: any
        number.
        """
        first = groups[0]
        key = id(first.layer.layout), first.layer.window is None, covering, first.is_stored, len(groups)
        found = first.step.computed.get(key)
        if found is None:
            found = first.step.computed[key] = cls._joined(groups, covering)
        return found

    @classmethod
    def _joined(cls, groups: list[GroupRows], covering: int | None) -> DecodedRows:
        contexts = [group.context_blocks for group in groups]
        chosen = [covering is not None and covering < context for context in contexts]
        # While others choose, a group that attends to all of its Context has an empty one.
        parts = [_of_group(group, any(chosen) and not chooses) for group, chooses in zip(groups, chosen, strict=True)]
        width = max(table.shape[1] for table, _ in parts)
        ends = list(accumulate(len(table) for table, _ in parts))
        rows = [slice(end - len(table), end) for (table, _), end in zip(parts, ends, strict=True)]
        if len(parts) == 1:
            ((table, ranges),) = parts
        else:
            table = np.full((ends[-1], width), _PADDING, np.int32)
            for (own, _), place in zip(parts, rows, strict=True):
                table[place, : own.shape[1]] = own
            ranges = np.concatenate([each for _, each in parts], axis=1)
        return cls(table, ranges, DecodedGroups([group.step.length for group in groups], contexts, chosen, rows))


def _of_group(group: GroupRows, is_dense: bool) -> tuple[np.ndarray, np.ndarray]:
    table, end = group.blocks.table, group.blocks.finalized
    first = end - group.context_blocks
    if group.layer.window is not None:
        # The window's device attends to the attention sink and the recent window.
        table, first, end = np.ascontiguousarray(table[:, first:end]), 0, end - first
    position = _STORED if group.is_stored else group.step.past
    return table, row_ranges(len(table), position, end if is_dense else first, end)
