"""A step: one forward of rows of equal length, described once and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hetero_kv.engine.device_table import DeviceTable
from hetero_kv.engine.sequence import Layout
from hetero_kv.engine.watched import Arriving, Watched

if TYPE_CHECKING:
    from hetero_kv.engine.cohort import Cohort


@dataclass(frozen=True)
class PromptPart:
    """Which part of a prompt a forward is, where a policy has prompts pass in strides.

    Attributes:
        question: how many of the whole prompt's last tokens ask what comes before; None where nobody says.
    """

    is_first: bool = True
    is_last: bool = True
    question: int | None = None


@dataclass(frozen=True)
class StepBlocks:
    """The blocks of one layout in a step, those of the new tokens among them.

    Attributes:
        table: [rows, blocks] int32, ids.
        length: tokens in blocks when the step is done.
        closed: what `layout.closed` says of the sequences when the step is done.
        newly_closed: blocks [first, end) whose contents become final with this step.
        lengths: [num_blocks] int32, tokens written in each block of the pools: what kernels go by.
    """

    table: np.ndarray
    length: int
    closed: int
    newly_closed: tuple[int, int]
    lengths: np.ndarray


class Step:
    """New tokens of a cohort's rows on their way through the layers.

    Attributes:
        cohort: whose rows.
        rows: where they stand in the batch.
        past: tokens that each row had before.
        tokens: new tokens of each row.
        length: tokens of each row when the step is done.
        is_decode: one token that is generated; else a prompt or a part of one.
        part: which part of a prompt.
        keeps: whether the tokens are stored; else they attend and are gone (a catalyst).
        watched: what is looked at before the tokens are stored.
        arriving: what is in DRAM then.
    """

    def __init__(
        self, cohort: Cohort, rows: slice, tokens: int, *, is_decode: bool, part: PromptPart, keeps: bool
    ) -> None:
        self.cohort = cohort
        self.rows = rows
        self.past = cohort.length
        self.tokens = tokens
        self.length = self.past + tokens
        self.is_decode = is_decode
        self.part = part
        self.keeps = keeps
        self.watched: list[Watched] = []
        self.arriving: list[Arriving] = []
        #: What `blocks` has made, by the layout's identity: a lookup that costs no hash of a layout's fields.
        self.made: dict[int, StepBlocks] = {}
        self._tables: dict[int, torch.Tensor] = {}

    def blocks(self, layout: Layout) -> StepBlocks:
        """The blocks of `layout`: made when the first layer asks, the same for all."""
        found = self.made.get(id(layout))
        if found is not None:
            return found
        cohort = self.cohort
        tables = [sequence.tables[layout] for sequence in cohort.sequences]
        ids = tables[0].ids[None] if len(tables) == 1 else np.stack([table.ids for table in tables])
        before, closed = cohort.closed[layout], layout.closed(self.length)
        end = max(before, closed) if self.part.is_last and self.keeps else before
        blocks = StepBlocks(ids, tables[0].length, closed, (before, end), tables[0].allocator.lengths)
        self.made[id(layout)] = blocks
        return blocks

    def table_on(self, device: torch.device, layout: Layout) -> torch.Tensor:
        """The block table of `layout` on a device, [rows, blocks] int32: looked at once for all layers."""
        found = self._tables.get(id(layout))
        if found is None:
            sent = self.cohort.device_tables.setdefault(layout, DeviceTable())
            found = self._tables[id(layout)] = sent.holding(self.blocks(layout).table, device)
        return found
