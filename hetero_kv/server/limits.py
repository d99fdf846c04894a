"""Admission to the engine: a queue that is fair between API keys, and rate limits."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from hetero_kv.server.errors import ApiError


class Ticket:
    """A request's place in the queue of a `Gate`. Each of its answers takes a row, one after the other if necessary."""

    def __init__(self, gate: Gate, key: str) -> None:
        self._gate, self.key = gate, key
        self.began: float | None = None
        self.rows = 0
        self._taken = 0
        self._first: Row | None = Row(self, 0)

    @property
    def first(self) -> Row:
        """The row of its first answer, which is queued with the request."""
        assert self._first is not None
        return self._first

    async def turn(self) -> None:
        """Wait until another answer of the request may be computed.

        Raises ApiError 429 if that takes longer than the gate's limit for the first one, and 503 if the server stops.
        """
        row, self._first = self._first, None
        self._taken += 1
        longest: float | None = self._gate.seconds
        if row is None:
            # It waits for the request's earlier answers, not for the request's turn.
            row, longest = Row(self, self._taken - 1), None
            self._gate.queue(row)
        try:
            async with asyncio.timeout(longest):
                await row.decided.wait()
        except TimeoutError:
            raise self._gate.refusal(f"the request waited for {self._gate.seconds:g} s") from None
        if not row.is_admitted:
            raise stopping()

    def done(self) -> None:
        """Give the row of an answer to another request."""
        self._gate.release(self)

    def leave(self) -> None:
        """Free all rows, and stop waiting. Further calls do nothing."""
        self._gate.leave(self)


class Row:
    """A row for answer number `number` of a request; `decided` once it is admitted, or never will be."""

    def __init__(self, ticket: Ticket, number: int) -> None:
        self.ticket, self.number = ticket, number
        self.decided = asyncio.Event()
        self.is_admitted = False


def stopping() -> ApiError:
    """The error of requests to a server that is stopping."""
    return ApiError(503, "the server stops; ask again when it is back", code="server_stopping", retry_after_s=10)


class Gate:
    """Lets a number of answers be computed at a time; others wait, and keys take turns.

    Among the rows of a key the first answers of requests come first, so that a request for many answers delays no other
    one.

    Args:
        rows: the number of answers that are computed at a time.
        length: the number of requests that may wait.
        seconds: the longest wait.
    """

    def __init__(self, rows: int, length: int, seconds: float) -> None:
        self._rows, self._length, self.seconds = rows, length, seconds
        self._inside = 0
        # By key, the key whose turn is next first.
        self._waiting: OrderedDict[str, list[Row]] = OrderedDict()
        # The moving average of the time of a request, seconds.
        self._usual_s = 1.0

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(row.number == 0 for rows in self._waiting.values() for row in rows)

    def enter(self, key: str) -> Ticket:
        """A place for a request of an API key.

        Raises ApiError 429 if the queue is full.
        """
        if self._inside >= self._rows and self.waiting >= self._length:
            raise self.refusal(f"{self._inside} answers are computed and {self.waiting} requests wait")
        ticket = Ticket(self, key)
        self.queue(ticket.first)
        return ticket

    def queue(self, row: Row) -> None:
        """Let a row wait for its turn."""
        self._waiting.setdefault(row.ticket.key, []).append(row)
        self._admit()

    def resize(self, rows: int) -> None:
        """From now on compute `rows` answers at a time; those in progress continue."""
        self._rows = rows
        self._admit()

    def refusal(self, reason: str) -> ApiError:
        """The error of a request that cannot be queued."""
        seconds = self._usual_s * (self.waiting + 1) / self._rows
        return ApiError(
            429, f"the server is busy: {reason}; try again in about {max(1, round(seconds))} s", code="queue_full",
            retry_after_s=seconds,
        )  # fmt: skip

    def release(self, ticket: Ticket) -> None:
        """See `Ticket.done`."""
        if ticket.rows:
            ticket.rows -= 1
            self._inside -= 1
        self._admit()

    def leave(self, ticket: Ticket) -> None:
        """See `Ticket.leave`."""
        if ticket.began is not None:
            self._usual_s += 0.2 * (time.monotonic() - ticket.began - self._usual_s)
            ticket.began = None
        self._inside -= ticket.rows
        ticket.rows = 0
        self._forget([row for row in self._waiting.get(ticket.key, ()) if row.ticket is ticket])
        self._admit()

    def stop(self) -> None:
        """Refuse all waiting requests."""
        for row in [row for rows in self._waiting.values() for row in rows]:
            self._forget([row])
            row.decided.set()

    def _forget(self, rows: Sequence[Row]) -> None:
        for row in rows:
            same_key = self._waiting[row.ticket.key]
            same_key.remove(row)
            if not same_key:
                del self._waiting[row.ticket.key]

    def _admit(self) -> None:
        while self._waiting and self._inside < self._rows:
            key, rows = next(iter(self._waiting.items()))
            row = min(rows, key=lambda each: each.number)
            self._waiting.move_to_end(key)
            self._forget([row])
            self._inside += 1
            row.ticket.rows += 1
            if row.ticket.began is None:
                row.ticket.began = time.monotonic()
            row.is_admitted = True
            row.decided.set()


class Rates:
    """Rate limits of each API key, per minute, as token buckets.

    Args:
        per_minute: units in a minute; "all" for no limit.
        unit: the name of what is counted, for errors.
        now: the clock, seconds.
    """

    def __init__(self, per_minute: int | Literal["all"], unit: str, now: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._unit, self._now = per_minute, unit, now
        # By key: the bucket's content, and the time of its update.
        self._left: dict[str, tuple[float, float]] = {}

    def require(self, key: str) -> None:
        """Raise ApiError 429 if the key's bucket is empty."""
        if self._per_minute == "all":
            return
        left = self._present(key)
        # An answer's length is not known before, so a bucket may be overdrawn once.
        if left < (1 if self._unit == "requests" else 0):
            seconds = (1 - left) * 60 / self._per_minute
            raise ApiError(
                429, f"this API key may use {self._per_minute:,} {self._unit} in a minute; try again in "
                f"{max(1, round(seconds))} s", code="rate_limit_exceeded", retry_after_s=seconds,
            )  # fmt: skip

    def use(self, key: str, units: int) -> None:
        """Count what a key has used."""
        if self._per_minute != "all":
            self._left[key] = self._present(key) - units, self._now()

    def _present(self, key: str) -> float:
        assert self._per_minute != "all"
        left, when = self._left.get(key, (float(self._per_minute), self._now()))
        return min(float(self._per_minute), left + (self._now() - when) * self._per_minute / 60)
