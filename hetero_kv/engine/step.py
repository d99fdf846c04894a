"""A step: one forward of rows of equal length, built once and read by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetero_kv.engine.checkpoint import LayerCheckpoint
from hetero_kv.engine.deferred_readback import CheckedNumber, HostCopy
from hetero_kv.engine.device_table import DeviceTable
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.engine.sequence import Layout

if TYPE_CHECKING:
    from hetero_kv.engine.equal_length_group import EqualLengthGroup


@dataclass(frozen=True)
class PromptPart:
    """The part of a prompt that a forward computes.

    Attributes:
        question: number of last tokens of the whole prompt that are the question; None when unknown.
        is_mixed: whether its tokens are rows of one token each, also beside decoded tokens (`TokenRows`).
    """

    is_first: bool = True
    is_last: bool = True
    question: int | None = None
    is_mixed: bool = False


@dataclass(frozen=True)
class StepBlocks:
    """The blocks of one layout in a step, including those of the new tokens.

    Attributes:
        table: [rows, blocks] int32, block ids.
        length: tokens in blocks at the end of the step.
        finalized: `layout.finalized` of the sequences at the end of the step.
        newly_finalized: blocks [first, end) that this step finalizes.
        closes: whether it finalizes any.
        lengths: [num_blocks] int32, tokens written in each block of the pools, for kernels.
    """

    table: np.ndarray
    length: int
    finalized: int
    newly_finalized: tuple[int, int]
    lengths: np.ndarray
    closes: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "closes", self.newly_finalized[0] != self.newly_finalized[1])


class Step:
    """One forward of the new tokens of a group's rows through all layers.

    Attributes:
        group: the group of the rows.
        rows: the rows of the batch.
        past: tokens of each row before the step.
        tokens: new tokens of each row.
        length: tokens of each row at the end of the step.
        is_decode: whether the new token is a generated one; else a prompt or a part of one.
        part: which part of a prompt.
        stores: whether the tokens are stored; else they attend and are dropped (a catalyst).
        is_draft: whether the forward decodes several tokens of the sequence, a step each.
        after: of a draft, the step of the previous token.
        draft_blocks: for a guess, the blocks that its token attends to; None for the layers' own attention.
        states: of a draft, layer -> its state after this step, for layers that have one.
        pause: called where the forward of a prompt can wait; None for nowhere.
        checked_numbers: deferred readbacks, checked before the tokens are stored.
        host_copies: copies to DRAM, finished by then.
    """

    def __init__(
        self, group: EqualLengthGroup, rows: slice, tokens: int, *, is_decode: bool, part: PromptPart, stores: bool,
        is_draft: bool = False, after: Step | None = None,
    ) -> None:  # fmt: skip
        self.group = group
        self.rows = rows
        self.past = group.length if after is None else after.length
        self.tokens = tokens
        self.length: int = self.past + tokens
        self.is_decode = is_decode
        self.part = part
        self.stores = stores
        self.is_draft, self.after = is_draft, after
        self.draft_blocks: DraftBlocks | None = None
        self.states: dict[int, LayerCheckpoint] = {}
        self.pause: Callable[[], None] | None = None
        self.checked_numbers: list[CheckedNumber] = []
        self.host_copies: list[HostCopy] = []
        #: The results of `blocks`, by the layout's identity: a lookup without hashing a layout's fields.
        self.made: dict[int, StepBlocks] = {}
        #: Results that a family computes once for all layers, by its own keys.
        self.computed: dict[Any, Any] = {}
        self._tables: dict[int, torch.Tensor] = {}

    def blocks(self, layout: Layout) -> StepBlocks:
        """The blocks of `layout`, built for the first layer that needs them and shared by all."""
        found = self.made.get(id(layout))
        if found is not None:
            return found
        group = self.group
        tables = [sequence.tables[layout] for sequence in group.sequences]
        ids = tables[0].ids[None] if len(tables) == 1 else np.stack([table.ids for table in tables])
        before = group.finalized[layout] if self.after is None else self.after.blocks(layout).newly_finalized[1]
        finalized = layout.finalized(self.length)
        end = max(before, finalized) if self.part.is_last and self.stores else before
        blocks = StepBlocks(ids, tables[0].length, finalized, (before, end), tables[0].allocator.lengths)
        self.made[id(layout)] = blocks
        return blocks

    def show_length(self) -> None:
        """Set the blocks' lengths to those at the end of this step, if later tokens are already in the blocks."""
        for layout in self.group.layouts:
            blocks = self.blocks(layout)
            blocks.lengths[blocks.table[:, -1]] = blocks.length - (blocks.table.shape[1] - 1) * layout.block_size

    def table_on(self, device: torch.device, layout: Layout) -> torch.Tensor:
        """The block table of `layout` on a device, [rows, blocks] int32; sent once for all layers."""
        found = self._tables.get(id(layout))
        if found is None:
            sent = self.group.device_tables.setdefault(layout, DeviceTable())
            found = self._tables[id(layout)] = sent.holding(self.blocks(layout).table, device)
        return found
