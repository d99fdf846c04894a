"""A batch of rows with one token each: tokens that follow in several sequences, and a part of a prompt."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

from hetero_kv.engine.batch_slice import BatchSlice
from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.step import PromptPart


class Passing(NamedTuple):
    """New tokens of one group in a mixed forward.

    Attributes:
        tokens: how many of each sequence; several for a draft of one sequence, and for a prompt.
        part: which part of a prompt they are; None for tokens that are decoded.
    """

    group: EqualLengthGroup
    tokens: int
    part: PromptPart | None = None


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of a mixed forward: the tokens that follow in each sequence, then the tokens of a part of a prompt.

    A sequence that decodes has one row, and one more for each drafted token. Everything but attention is computed for
    all rows alike, so that all share one reading of the weights.

    Attributes:
        slices: the rows of each group; a prompt's are the last ones.
        positions: the position of each row's token in its sequence.
        kept_rows: the rows whose logits are needed: all that decode, and the prompt's last one.
    """

    slices: tuple[BatchSlice, ...]
    positions: tuple[int, ...]
    kept_rows: tuple[int, ...]

    @classmethod
    def of(cls, passing: Rows[Passing]) -> ForwardBatch:
        """A batch of these tokens, in their order. A group of which several tokens pass has one sequence."""
        column, row = slice(0, 1), 0
        slices: list[BatchSlice] = []
        positions: list[int] = []
        kept: list[int] = []
        for group, tokens, part in passing:
            rows = slice(row, row + len(group.sequences) * tokens)
            slices.append(BatchSlice(group, rows, column, part, is_draft=part is None and tokens > 1))
            positions += [each.length + index for each in group.sequences for index in range(tokens)]
            kept += range(rows.start if part is None else rows.stop - 1, rows.stop)
            row = rows.stop
        return cls(tuple(slices), tuple(positions), tuple(kept))
