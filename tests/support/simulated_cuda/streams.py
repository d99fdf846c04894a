"""Streams and events: which of the device's work is known to be done, and by whom.

Kernels compute at once, and the order of a real device is checked instead. A stream counts its work. A waiting
stream or host knows that the work until then is done (vector clocks). A use of memory that a stream wrote is a race
unless the user knows that the write is done.
"""

from __future__ import annotations

from typing import Any

#: How much of each stream's work is known to be done.
Clock = dict["Stream", int]


def _learn(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class Stream:
    """A queue of work, as `torch.cuda.Stream`.

    Attributes:
        index: of its device.
        is_default: whether it is the device's own.
        done: work queued so far.
        knows: of other streams.
    """

    simulation: Any = None

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.index = self.simulation.index_of(device)
        self.is_default = False
        self.done = 0
        self.knows: Clock = {}

    @property
    def clock(self) -> Clock:
        """What is done when all its work so far is."""
        return {**self.knows, self: self.done}

    def has_seen(self, stream: Stream, count: int) -> bool:
        """Whether work queued now comes after the first `count` pieces of `stream`'s."""
        return stream is self or self.knows.get(stream, 0) >= count

    def wait_stream(self, other: Stream) -> None:
        self.simulation.refuse_capturing("wait_stream")
        _learn(self.knows, other.clock)

    def wait_event(self, event: Event) -> None:
        self.simulation.refuse_capturing("wait_event")
        _learn(self.knows, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.simulation.host_waits("stream.synchronize", self.clock)


class Event:
    """A point in a stream's work, as `torch.cuda.Event`."""

    simulation: Any = None

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.simulation.refuse_capturing("event.record")
        stream = self.simulation.current_stream() if stream is None else stream
        self.clock = stream.clock

    def wait(self, stream: Stream | None = None) -> None:
        (self.simulation.current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        self.simulation.host_waits("event.synchronize", self.clock, False)


class Host:
    """What the host knows to be done."""

    def __init__(self) -> None:
        self.knows: Clock = {}

    def learn(self, clock: Clock) -> None:
        _learn(self.knows, clock)

    def has_seen(self, stream: Stream, count: int) -> bool:
        return self.knows.get(stream, 0) >= count
