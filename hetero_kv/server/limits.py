"""How many requests are computed, wait, or are refused: a queue that is fair between API keys, and rates."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal

from hetero_kv.server.errors import ApiError


class Ticket:
    """A request's place in the queue of a `Gate`."""

    def __init__(self, gate: Gate, key: str) -> None:
        self._gate, self.key = gate, key
        self.admitted = asyncio.Event()
        self.began: float | None = None

    async def turn(self) -> None:
        """Wait until the request may be computed.

        Raises ApiError 429 if that takes longer than the gate's limit.
        """
        try:
            async with asyncio.timeout(self._gate.seconds):
                await self.admitted.wait()
        except TimeoutError:
            raise self._gate.refusal(f"the request waited for {self._gate.seconds:g} s") from None

    def leave(self) -> None:
        """Give the place to another request. Further calls do nothing."""
        self._gate.leave(self)


class Gate:
    """Lets a number of requests through at a time; others wait, and keys take turns.

    Args:
        rows: the requests that are computed at a time.
        length: the requests that may wait.
        seconds: the longest wait.
    """

    def __init__(self, rows: int, length: int, seconds: float) -> None:
        self._rows, self._length, self.seconds = rows, length, seconds
        self._inside: set[Ticket] = set()
        # By key, the key whose turn is next first.
        self._waiting: OrderedDict[str, deque[Ticket]] = OrderedDict()
        # The mean time of a request, seconds; recent ones count most.
        self._usual_s = 1.0

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    def enter(self, key: str) -> Ticket:
        """A place for a request of an API key.

        Raises ApiError 429 if the queue is full.
        """
        ticket = Ticket(self, key)
        if len(self._inside) >= self._rows and self.waiting >= self._length:
            raise self.refusal(f"{len(self._inside)} requests are computed and {self.waiting} wait")
        self._waiting.setdefault(key, deque()).append(ticket)
        self._admit()
        return ticket

    def refusal(self, reason: str) -> ApiError:
        """The error of a request for which there is no room."""
        seconds = self._usual_s * (self.waiting + 1) / self._rows
        return ApiError(
            429, f"the server is busy: {reason}; try again in about {max(1, round(seconds))} s", code="queue_full",
            retry_after_s=seconds,
        )  # fmt: skip

    def leave(self, ticket: Ticket) -> None:
        """See `Ticket.leave`."""
        if ticket in self._inside:
            self._inside.remove(ticket)
            assert ticket.began is not None
            self._usual_s += 0.2 * (time.monotonic() - ticket.began - self._usual_s)
        elif ticket in self._waiting.get(ticket.key, ()):
            self._waiting[ticket.key].remove(ticket)
            if not self._waiting[ticket.key]:
                del self._waiting[ticket.key]
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._inside) < self._rows:
            key, tickets = next(iter(self._waiting.items()))
            ticket = tickets.popleft()
            self._waiting.move_to_end(key)
            if not tickets:
                del self._waiting[key]
            ticket.began = time.monotonic()
            self._inside.add(ticket)
            ticket.admitted.set()


class Rates:
    """What each API key may use in a minute, as a bucket that fills steadily.

    Args:
        most: units in a minute; "all" for no limit.
        unit: the name of what is counted, for errors.
        now: the clock, seconds.
    """

    def __init__(self, most: int | Literal["all"], unit: str, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._unit, self._now = most, unit, now
        # By key: what may be used, and when that was so.
        self._left: dict[str, tuple[float, float]] = {}

    def require(self, key: str) -> None:
        """Raise ApiError 429 if the key has used all that it may."""
        if self._most == "all":
            return
        left = self._present(key)
        # An answer's length is not known before, so that a bucket may be overdrawn once.
        if left < (1 if self._unit == "requests" else 0):
            seconds = (1 - left) * 60 / self._most
            raise ApiError(
                429, f"this API key may use {self._most:,} {self._unit} in a minute; try again in "
                f"{max(1, round(seconds))} s", code="rate_limit_exceeded", retry_after_s=seconds,
            )  # fmt: skip

    def use(self, key: str, units: int) -> None:
        """Count what a key has used."""
        if self._most != "all":
            self._left[key] = self._present(key) - units, self._now()

    def _present(self, key: str) -> float:
        assert self._most != "all"
        left, when = self._left.get(key, (float(self._most), self._now()))
        return min(float(self._most), left + (self._now() - when) * self._most / 60)
