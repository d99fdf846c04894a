"""Pending queries: decoded queries whose attention is not yet added to what the keys have received."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class _Query(NamedTuple):
    """One query of every row.

    Attributes:
        q: [batch, heads, k_dim] float32.
        lse: [any, heads] float32, the log-sum-exp of its attention; NaN until a device has sent it.
        rows: [batch], each row's index into `lse`: rows can be selected before the device writes to it.
    """

    q: np.ndarray
    lse: np.ndarray
    rows: np.ndarray


class PendingQueries(NamedTuple):
    """Immutable list of pending queries, oldest first. A longer list shares the storage of the one it grew from.

    Attributes:
        queries: the shared storage; only the first list that grows from `count` appends to it.
        count: the number of queries that belong to this list.
    """

    queries: list[_Query]
    count: int  # type: ignore[assignment]

    def grown(self, q: np.ndarray, lse: np.ndarray) -> PendingQueries:
        """The list with one more query, q [batch, heads, k_dim] float32 and lse [batch, heads].

        `lse` may be filled later.
        """
        queries = self.queries if 0 < self.count == len(self.queries) else self.queries[: self.count]
        queries.append(_Query(q, lse, np.arange(len(q))))
        return PendingQueries(queries, self.count + 1)

    def first(self, count: int) -> PendingQueries:
        """The oldest `count` queries."""
        return PendingQueries(self.queries, count)

    def selected(self, rows: list[int]) -> PendingQueries:
        """The queries after a selection of rows: row i takes those of row `rows[i]`."""
        chosen = [_Query(each.q[rows], each.lse, each.rows[rows]) for each in self.queries[: self.count]]
        return PendingQueries(chosen, len(chosen))

    def stacked(self) -> tuple[np.ndarray, np.ndarray]:
        """All queries: q [batch, heads, queries, k_dim] and lse [batch, heads, queries]. There must be at least one."""
        queries = self.queries[: self.count]
        return np.stack([each.q for each in queries], axis=2), np.stack(
            [each.lse[each.rows] for each in queries], axis=2
        )


NO_PENDING_QUERIES = PendingQueries([], 0)
