"""The rows whose tokens one native call decodes in a layer: those of one group, or of several in one pool."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetero_kv.cpu_ops.step_contract import row_ranges
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.retrieval.layer import RetrievalLayer

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
    """

    table: np.ndarray
    ranges: np.ndarray

    @classmethod
    def of(cls, groups: list[GroupRows], dense: tuple[bool, ...]) -> DecodedRows:
        """Rows of several groups, in the order of the batch; computed once for all layers of a forward.

        dense: for each group whether its rows attend to all of their Context while others choose; their Context is
        then empty.
        """
        first = groups[0]
        key = id(first.layer.layout), first.layer.window is None, dense, *[group.is_stored for group in groups]
        found = first.step.computed.get(key)
        if found is None:
            found = first.step.computed[key] = cls._joined(
                [_of_group(*each) for each in zip(groups, dense, strict=True)]
            )
        return found

    @classmethod
    def _joined(cls, parts: list[DecodedRows]) -> DecodedRows:
        if len(parts) == 1:
            return parts[0]
        width = max(part.table.shape[1] for part in parts)
        tables = [np.pad(t, ((0, 0), (0, width - t.shape[1])), constant_values=_PADDING) for t, _ in parts]
        return cls(np.concatenate(tables), np.concatenate([part.ranges for part in parts], axis=1))


def parts_of(groups: list[GroupRows], array: np.ndarray) -> list[np.ndarray]:
    """The rows of each group in an array [rows, ...]."""
    if len(groups) == 1:
        return [array]
    start = groups[0].step.rows.start
    return [array[group.step.rows.start - start : group.step.rows.stop - start] for group in groups]


def _of_group(group: GroupRows, dense: bool) -> DecodedRows:
    table, end = group.blocks.table, group.blocks.finalized
    first = end - group.context_blocks
    if group.layer.window is not None:
        # The window's device attends to the attention sink and the recent window.
        table, first, end = np.ascontiguousarray(table[:, first:end]), 0, end - first
    position = _STORED if group.is_stored else group.step.past
    return DecodedRows(table, row_ranges(len(table), position, end if dense else first, end))
