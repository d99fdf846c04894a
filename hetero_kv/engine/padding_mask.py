"""The padding mask of a batch: which columns hold a token of each row."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PaddingMask:
    """The columns passed to the model so far, padding included.

    Attributes:
        count: number of columns.
        padding: [rows, count] bool on the CPU, True where a row has a token; None if no row has padding.
    """

    count: int = 0
    padding: torch.Tensor | None = None

    @property
    def is_ragged(self) -> bool:
        """Whether any row has padding."""
        return self.padding is not None

    def mask(self, rows: int) -> torch.Tensor:
        """[rows, count] int64, 1 where a row has a token."""
        return self._known(rows).long()

    def grown(self, width: int, tokens: Rows[int]) -> PaddingMask:
        """The columns followed by `width` more; row i has a token in the last `tokens[i]` of these."""
        if self.padding is None and all(count == width for count in tokens):
            return PaddingMask(self.count + width)
        new = torch.arange(width) >= width - torch.tensor(list(tokens))[:, None]
        return PaddingMask(self.count + width, torch.cat([self._known(len(tokens)), new], dim=1))

    def tokens_after(self, column: int, rows: int) -> list[int]:
        """Number of tokens of each row in the columns from `column` on."""
        if self.padding is None:
            return [self.count - column] * rows
        return self.padding[:, column:].sum(dim=1).tolist()

    def cut(self, count: int) -> PaddingMask:
        """The first `count` columns."""
        return _simplified(count, None if self.padding is None else self.padding[:, :count])

    def select(self, rows: Rows[int]) -> PaddingMask:
        """The columns with row i replaced by the present row `rows[i]`."""
        return _simplified(self.count, None if self.padding is None else self.padding[list(rows)])

    def joined(self, rows: int, other: PaddingMask, other_rows: int) -> PaddingMask:
        """The columns of both batches, rows of `other` last; the narrower one is left-padded."""
        count = max(self.count, other.count)
        parts = [self._known(rows), other._known(other_rows)]
        padded = [torch.nn.functional.pad(part, (count - part.shape[1], 0)) for part in parts]
        return _simplified(count, torch.cat(padded))

    def _known(self, rows: int) -> torch.Tensor:
        return torch.ones(rows, self.count, dtype=torch.bool) if self.padding is None else self.padding


def _simplified(count: int, padding: torch.Tensor | None) -> PaddingMask:
    return PaddingMask(count, None if padding is None or bool(padding.all()) else padding)
