"""A batch of rows with one token each: decoded tokens of several sequences, and a part of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from hetero_kv.engine.batch_slice import BatchSlice
from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.step import PromptPart


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of a mixed forward: one token of each sequence that decodes, then the tokens of a part of a prompt.

    Everything but attention is computed for all rows alike, so that all share one reading of the weights.

    Attributes:
        slices: the rows of each group; the last slice is the prompt's.
        positions: the position of each row's token in its sequence.
        kept_rows: the rows whose logits are needed: all that decode, and the prompt's last one.
    """

    slices: tuple[BatchSlice, ...]
    positions: tuple[int, ...]
    kept_rows: tuple[int, ...]

    @classmethod
    def of(
        cls, decoding: list[EqualLengthGroup], prompt: EqualLengthGroup, tokens: int, part: PromptPart
    ) -> ForwardBatch:
        """A batch of one token of each row of `decoding`, and `tokens` tokens of the prompt of one row in `prompt`."""
        column = slice(0, 1)
        ends = list(accumulate(len(group.sequences) for group in decoding))
        slices = [
            BatchSlice(group, slice(end - len(group.sequences), end), column)
            for group, end in zip(decoding, ends, strict=True)
        ]
        rows = ends[-1]
        slices.append(BatchSlice(prompt, slice(rows, rows + tokens), column, part))
        positions = [sequence.length for group in decoding for sequence in group.sequences]
        positions += range(prompt.length, prompt.length + tokens)
        return cls(tuple(slices), tuple(positions), (*range(rows), rows + tokens - 1))
