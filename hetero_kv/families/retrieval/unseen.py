"""Queries that have been decoded, and what of them is not yet added to the attention that keys have received."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class _Query(NamedTuple):
    """A query of every row.

    Attributes:
        q: [batch, heads, k_dim] float32.
        lse: [any, heads] float32, the log-sum-exp of its attention; NaN until a device has told it.
        rows: [batch], which of `lse` is whose: rows may have been selected before it was told.
    """

    q: np.ndarray
    lse: np.ndarray
    rows: np.ndarray


class Unseen(NamedTuple):
    """Queries, oldest first; never changed: what is longer by one shares what came before.

    Attributes:
        queries: written to behind `count` by the first that grows from there, and never again.
        count: how many of them are this one's.
    """

    queries: list[_Query]
    count: int  # type: ignore[assignment]

    def grown(self, q: np.ndarray, lse: np.ndarray) -> Unseen:
        """With one query more, q [batch, heads, k_dim] float32 and lse [batch, heads], which may be written later."""
        queries = self.queries if 0 < self.count == len(self.queries) else self.queries[: self.count]
        queries.append(_Query(q, lse, np.arange(len(q))))
        return Unseen(queries, self.count + 1)

    def first(self, count: int) -> Unseen:
        """The oldest `count`."""
        return Unseen(self.queries, count)

    def selected(self, rows: list[int]) -> Unseen:
        """With row i what row `rows[i]` was."""
        chosen = [_Query(each.q[rows], each.lse, each.rows[rows]) for each in self.queries[: self.count]]
        return Unseen(chosen, len(chosen))

    def stacked(self) -> tuple[np.ndarray, np.ndarray]:
        """All of them: q [batch, heads, queries, k_dim] and lse [batch, heads, queries]. There must be some."""
        queries = self.queries[: self.count]
        return np.stack([each.q for each in queries], axis=2), np.stack(
            [each.lse[each.rows] for each in queries], axis=2
        )


NONE_UNSEEN = Unseen([], 0)
