"""The cache layer of token retrieval: blocks as in retrieval, and the arrays of a chooser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.engine.statistics import NO_NUMBERS, READ_BYTES, Tally
from hetero_kv.engine.step import Step
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.read_bytes import ReadSizes, SelectionStatistics
from hetero_kv.families.retrieval.state import RetrievalState
from hetero_kv.families.token_retrieval.choosers.chooser import NOTHING_LEARNED, Chooser, LearnedState
from hetero_kv.families.token_retrieval.choosers.settings import TokenSettings
from hetero_kv.families.token_retrieval.statistics import ATTENDED_TOKENS
from hetero_kv.store.pool_arrays import AuxiliaryArray


@dataclass(frozen=True)
class TokenLayout(RetrievalLayout):
    """Initial | Context | Local. Its block tables are separate, because choosers derive block arrays.

    Attributes:
        segment_tokens: the chooser derives block arrays for segments of this many tokens, which end at segment ends; 0
            if it derives each block separately. Layers with different segments have separate block tables, because one
            may rederive blocks that the other keeps.
    """

    segment_tokens: int = 0

    @classmethod
    def of_chooser(
        cls, settings: TokenSettings, chooser: Chooser | None, has_whole_window: bool = False
    ) -> TokenLayout:
        """The layout of a layer with this chooser; None where all tokens are attended to."""
        layout = cls.of_settings(settings, chooser is not None and chooser.learns, has_whole_window)
        assert isinstance(layout, TokenLayout)
        return replace(layout, segment_tokens=0 if chooser is None else chooser.segment_tokens)


@dataclass(frozen=True)
class TokenState(RetrievalState):
    """The state of a layer apart from its tokens.

    Attributes:
        known: the state that the chooser has learned from the sequences.
        learned: number of first blocks that it was learned from; without any of them it is void.
        query_length: length of the sequence at the queries that it was learned from; it is void if the last of these is
            removed. 0 if it was learned from keys alone.
        tokens: Context tokens that a kv head attended to, per step.
    """

    known: LearnedState = field(default_factory=dict)
    learned: int = 0
    query_length: int = 0
    tokens: Tally = NO_NUMBERS

    def selected(self, rows: list[int]) -> TokenState:
        """The state whose row i is the former row `rows[i]`."""
        chosen = super().selected(rows)
        assert isinstance(chosen, TokenState)
        return replace(chosen, known={name: tensor[rows] for name, tensor in self.known.items()})


class TokenRetrievalLayer(RetrievalLayer):
    """Keys and values in a pool, with the arrays of `chooser`; None where all tokens are attended to."""

    layout: TokenLayout
    state: TokenState

    def __init__(self, settings: TokenSettings, chooser: Chooser | None) -> None:
        self.chooser = chooser
        super().__init__(TokenLayout.of_chooser(settings, chooser), settings)

    def _blank_state(self) -> TokenState:
        return TokenState(open_start=self.layout.sink_blocks * self.layout.block_size)

    @property
    def accumulates(self) -> bool:
        return False

    def auxiliary_arrays(self, kv_heads: int, k_dim: int, v_dim: int) -> Mapping[str, AuxiliaryArray]:
        return {} if self.chooser is None else self.chooser.arrays(KVShape(kv_heads, k_dim, v_dim))

    def finalize(self, step: Step, queries: torch.Tensor | None = None) -> None:
        """Derive the chooser's arrays of the blocks that enter the Context; `queries` as in `Chooser.learned`."""
        blocks, pool, sink = step.blocks(self.layout), self.pool, self.layout.sink_blocks
        first, end = max(blocks.newly_finalized[0], sink), blocks.newly_finalized[1]
        if self.chooser is None or first >= end:
            return
        assert pool is not None
        known, query_length = self.state.known, self.state.query_length
        if not known and queries is not None:
            known = self.chooser.learned(pool, blocks.table, first, end, queries)
            query_length = step.length if known else 0
        known = self.chooser.finalize(pool, blocks.table, first, end, known)
        if known is not self.state.known:
            self.state = replace(self.state, known=known, learned=end, query_length=query_length)

    def count(self, length: int, context: int, tokens: float, choice_bytes: float) -> None:
        """Count what a step reads of a sequence of `length` tokens, whose Context has `context` blocks.

        tokens: Context tokens that a kv head attended to. choice_bytes: bytes read to choose them.
        """
        if self.reading is None:
            assert self.pool is not None
            self.reading = ReadSizes.of(self.pool, self.window)
        reading = self.reading
        around = reading.of_step(length, context, SelectionStatistics(0))
        # The offset of a block is read again for each scattered token of another block.
        offsets = min(tokens, float(context)) * reading.offset
        self.read = self.read.plus(around + tokens * reading.token + offsets + choice_bytes)
        if self.chooser is not None:
            self.state = replace(self.state, tokens=self.state.tokens.plus(tokens))

    def crop(self, length: int) -> None:
        super().crop(length)
        state, layout = self.state, self.layout
        if self.chooser is None or not state.known:
            return
        full = length // layout.block_size
        kept = self.chooser.kept_until(state.known, state.learned, full, layout.finalized(length))
        if kept == 0 or length < state.query_length:
            self._forget()
        elif kept < full:
            self.group.set_finalized(layout, min(kept, self.group.finalized[layout]))
            self.state = replace(state, learned=min(kept, state.learned))

    def expect(self, tokens: int) -> bool:
        state, layout = self.state, self.layout
        if self.chooser is None or not state.known:
            return False
        is_outgrown = self.chooser.is_outgrown((state.learned - layout.sink_blocks) * layout.block_size, tokens)
        if is_outgrown:
            self._forget()
        return is_outgrown

    def reopen(self) -> None:
        super().reopen()
        self._forget()

    def _forget(self) -> None:
        """Discard the learned state, and with it the derived arrays of all blocks."""
        if self.state.known:
            self.group.set_finalized(self.layout, 0)
            self.state = replace(self.state, known=NOTHING_LEARNED, learned=0, query_length=0)

    def saved(self) -> SavedPart:
        part = super().saved()
        part.numbers |= {"learned": self.state.learned, "tokens": list(self.state.tokens)}
        if self.state.query_length:
            part.numbers["asked_at"] = self.state.query_length
        part.put(**{f"known_{name}": tensor for name, tensor in self.state.known.items()})
        return part

    def restore(self, part: SavedPart, target: RestoreTarget) -> None:
        super().restore(part, target)
        rows, kv_heads, _, k_dim = target.keys.shape
        shape, known = KVShape(kv_heads, k_dim, target.values.shape[-1]), {}
        shapes = {} if self.chooser is None else self.chooser.known_shapes(shape)
        # Not limited to finalized blocks: a cropped sequence keeps the state learned from blocks now in its window.
        learned = part.integer("learned", 0, self.group.length // self.layout.block_size)
        if learned:
            for name, (of_row, dtype) in shapes.items():
                known[name] = part.tensor(f"known_{name}", (rows, *of_row), dtype, torch.device("cpu"))
        old = {each.name: getattr(self.state, each.name) for each in fields(RetrievalState)}
        query_length = part.optional_integer("asked_at", 0, self.group.length) or 0
        self.state = TokenState(
            **old, known=known, learned=learned, query_length=query_length, tokens=part.tally("tokens")
        )

    @property
    def statistics(self) -> dict[str, float | int | None]:
        return {**self.state.statistics, READ_BYTES.name: self.read.mean, ATTENDED_TOKENS.name: self.state.tokens.mean}
