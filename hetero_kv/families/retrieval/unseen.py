"""Queries that have been decoded, and what of them is not yet added to the attention that keys have received."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: A query [batch, heads, k_dim] float32, and the log-sum-exp of its attention [batch, heads].
_Query = tuple[np.ndarray, np.ndarray]


class Unseen(NamedTuple):
    """Queries, oldest first; never changed: what is longer by one shares what came before.

    Attributes:
        queries: written to behind `count` by the first that grows from there, and never again.
        count: how many of them are this one's.
    """

    queries: list[_Query]
    count: int  # type: ignore[assignment]

    def grown(self, q: np.ndarray, lse: np.ndarray) -> Unseen:
        """With one query more, q [batch, heads, k_dim] float32 and lse [batch, heads]."""
        queries = self.queries if 0 < self.count == len(self.queries) else self.queries[: self.count]
        queries.append((q, lse))
        return Unseen(queries, self.count + 1)

    def first(self, count: int) -> Unseen:
        """The oldest `count`."""
        return Unseen(self.queries, count)

    def selected(self, rows: list[int]) -> Unseen:
        """With row i what row `rows[i]` was."""
        chosen = [(q[rows], lse[rows]) for q, lse in self.queries[: self.count]]
        return Unseen(chosen, len(chosen))

    def stacked(self) -> _Query:
        """All of them: q [batch, heads, queries, k_dim] and lse [batch, heads, queries]. There must be some."""
        q, lse = zip(*self.queries[: self.count], strict=True)
        return np.stack(q, axis=2), np.stack(lse, axis=2)


NONE_UNSEEN = Unseen([], 0)
