"""The stream of a request: its tokens as they are computed, and the whole answer at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from hetero_kv.serving.reuse import Reuse

#: The type of a stream's result.
Result = TypeVar("Result")
FinishReason = Literal["end", "stop_text", "max_new_tokens", "stopped", "full"]


@dataclass(frozen=True)
class Piece:
    """One token of an answer.

    Attributes:
        token: its id.
        text: the text that has become certain with it; "" while a character or a possible stop text is unfinished.
        logprob, alternatives: as in `sampler.Choice`.
        marker: the text of a token that is one of the request's markers, which follows `text` and is no part of it; ""
            for other tokens.
    """

    token: int
    text: str
    logprob: float | None = None
    alternatives: Mapping[int, float] = field(default_factory=dict)
    marker: str = ""


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    Attributes:
        text: without special tokens and markers, and without the stop text.
        pieces: its tokens. Their texts, joined, are the beginning of `text`.
        finish_reason: "end" of turn, a "stop_text", "max_new_tokens" reached, "stopped" by the caller, or "full":
            `max_seq_len` has no room for more.
        stop_text: the stop text that ended it.
        prompt_tokens: the prompt's number of tokens.
        cached_tokens: how many of them were computed before.
        first_token_s: seconds from the request to its first token; None without one.
        total_s: seconds from the request to its end.
        reuse: why no more of them were computed before.
        drafted_tokens: how many tokens were guessed and verified (speculation).
        accepted_tokens: how many of these guesses were right.
    """

    text: str
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason
    stop_text: str | None
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float | None
    total_s: float
    reuse: Reuse = field(default_factory=Reuse)
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of its tokens, an end-of-turn token included."""
        return tuple(piece.token for piece in self.pieces)


@dataclass(frozen=True)
class Progress:
    """How much of a prompt is computed.

    Attributes:
        prompt_tokens: the prompt's number of tokens.
        cached_tokens: how many of them another request had computed.
        processed_tokens: how many have passed all layers, those of a chunk in progress in proportion to its layers;
            cached ones included.
        elapsed_s: seconds since the request was admitted.
    """

    prompt_tokens: int
    cached_tokens: int
    processed_tokens: int
    elapsed_s: float


class ResultStream(Generic[Result]):
    """The result of one request. Iterating, also with `async for`, gives its pieces; `await` gives the whole result.

    Several threads and tasks may read it. Leaving a loop early does not cancel the request; `cancel` does.

    Args:
        cancel: tells the engine that the request is cancelled.
        compute: computes a step of the engine; None if a thread does that.

    Attributes:
        progress: how much of the prompt is computed; None while the request waits.
        reuse: how much of the prompt was computed before; None until the prefill of the rest starts.
        is_cancelled: whether the request ends before its next token.
    """

    progress: Progress | None = None
    reuse: Reuse | None = None
    is_cancelled: bool = False

    def __init__(
        self, cancel: Callable[[ResultStream[Any]], None], compute: Callable[[], object] | None = None
    ) -> None:
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._completion: Result | None = None
        self._error: BaseException | None = None
        self._wakers: list[_Waker] = []
        self._cancel, self._compute = cancel, compute

    # -- for the reader

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, each as it comes. Raises the request's error, if it fails."""
        known = 0
        while (piece := self._following(known)) is not None:
            yield piece
            known += 1

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the whole answer.

        Args:
            timeout: seconds to wait; None waits as long as it takes. If this call computes, it finishes a step that has
                begun.

        Raises the request's error if it failed, and TimeoutError.
        """
        with self._changed:
            if self._compute is None and not self._changed.wait_for(lambda: self.is_done, timeout):
                raise _late(timeout)
        began = time.monotonic()
        while not self.is_done and self._compute is not None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise _late(timeout)
            self._compute()
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """As `__iter__`, without blocking the event loop."""
        known = 0
        with self._woken() as waker:
            while True:
                while known < len(self._pieces):
                    yield self._pieces[known]
                    known += 1
                if self.is_done and known == len(self._pieces):
                    break
                await self._change(waker)
        if self._error is not None:
            raise self._error

    async def bursts(self, pause_s: Callable[[], float]) -> AsyncIterator[Sequence[Piece]]:
        """As `async for`, in lists: the first piece at once, and then what has come since the last list.

        Args:
            pause_s: how long nothing is given behind a list, seconds; the end of the answer ends the pause.
        """
        known = 0
        with self._woken() as waker:
            while True:
                if known < len(self._pieces):
                    burst = self._pieces[known:]
                    known += len(burst)
                    yield burst
                    if not self.is_done:
                        await waker.ended(pause_s())
                elif self.is_done:
                    break
                else:
                    await self._change(waker)
        if self._error is not None:
            raise self._error

    def __await__(self) -> Generator[object, None, Result]:
        return self._awaited().__await__()

    async def _awaited(self) -> Result:
        with self._woken() as waker:
            while not self.is_done:
                await self._change(waker)
        return self.result()

    def cancel(self) -> None:
        """End the request before the engine's next forward, or between two chunks of its prompt; its tokens stay."""
        self.is_cancelled = True
        self._cancel(self)

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete, or has failed."""
        return self._completion is not None or self._error is not None

    def _following(self, known: int) -> Piece | None:
        """The piece after the first `known`; None after the last."""
        while True:
            with self._changed:
                if self._compute is None:
                    self._changed.wait_for(lambda: len(self._pieces) > known or self.is_done)
                if len(self._pieces) > known:
                    return self._pieces[known]
                if self._error is not None:
                    raise self._error
                if self.is_done:
                    return None
            assert self._compute is not None
            self._compute()

    @contextmanager
    def _woken(self) -> Iterator[_Waker]:
        """The waker of the running task, which is called for every change."""
        waker = _Waker()
        with self._changed:
            self._wakers.append(waker)
        try:
            yield waker
        finally:
            with self._changed:
                self._wakers.remove(waker)

    async def _change(self, waker: _Waker) -> None:
        """Wait for a change since the task last waited."""
        if self._compute is not None:
            self._compute()
            await asyncio.sleep(0)
            return
        await waker.wait()

    # -- for the engine

    def put(self, piece: Piece) -> None:
        """Give a token to the readers."""
        with self._changed:
            self._pieces.append(piece)
            self._wake()

    def complete(self, completion: Result) -> None:
        """End the stream with the complete answer."""
        with self._changed:
            self._completion = completion
            self._wake(is_last=True)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error."""
        with self._changed:
            self._error = error
            self._wake(is_last=True)

    def _wake(self, is_last: bool = False) -> None:
        self._changed.notify_all()
        for waker in self._wakers:
            waker.wake()
            if is_last:
                waker.end()


class _Waker:
    """Wakes the task that created it, from any thread; once for all changes that the task has not seen yet."""

    def __init__(self) -> None:
        self._loop, self._event, self._ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._is_due = False

    def wake(self) -> None:
        """Let `wait` return."""
        if not self._is_due:
            self._is_due = True
            self._call(self._event.set)

    def end(self) -> None:
        """Let `ended` return: there will be no further change."""
        self._call(self._ended.set)

    def _call(self, set_event: Callable[[], None]) -> None:
        """Call this in the loop; not if that is closed, which its thread may do at any moment."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(set_event)

    async def ended(self, seconds: float) -> None:
        """Wait for so many seconds, but no longer than until the `end`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    async def wait(self) -> None:
        """Wait for a `wake` since the last return."""
        await self._event.wait()
        self._event.clear()
        # Cleared before the task looks, so that later changes wake it again.
        self._is_due = False


#: The stream of an answer. Other requests have no pieces.
Stream = ResultStream[Completion]


def _late(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"the answer is not complete after {timeout} seconds; wait longer, or cancel it")
