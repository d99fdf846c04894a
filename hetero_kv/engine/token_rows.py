"""The rows of a forward with one token each: tokens that follow in several sequences, and parts of prompts."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

from hetero_kv.engine.batch_slice import BatchSlice
from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.step import PromptPart, Step


class NewTokens(NamedTuple):
    """New tokens of one group in a forward with one token per row.

    Attributes:
        tokens: how many of each sequence; several for a draft of one sequence, and for a prompt.
        part: which part of a prompt they are; None for tokens that are decoded.
    """

    group: EqualLengthGroup
    tokens: int
    part: PromptPart | None = None


class TokenRows:
    """The rows of a mixed or verifying forward: the next tokens of each sequence, then those of parts of prompts.

    A sequence that decodes has one row, and one more for each drafted token. Everything but attention is computed for
    all rows alike, so that all share one reading of the weights.

    Args:
        new_tokens: in the order of the rows. A group of which several tokens pass has one sequence.

    Attributes:
        slices: the rows of each group; those of prompts are the last ones.
        steps: of the tokens, once the forward has stored them; drafted tokens can be dropped by them.
    """

    def __init__(self, new_tokens: Rows[NewTokens]) -> None:
        column, row = slice(0, 1), 0
        slices: list[BatchSlice] = []
        for group, tokens, part in new_tokens:
            rows = slice(row, row + len(group.sequences) * tokens)
            slices.append(BatchSlice(group, rows, column, part, is_draft=part is None and tokens > 1))
            row = rows.stop
        self.slices = tuple(slices)
        self.steps: tuple[Step, ...] = ()
