"""Turns of the engines of a process: one computes at a time, and each as often as the others."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import NamedTuple, Self


class Others(NamedTuple):
    """The work of the other engines of the process.

    Attributes:
        rows: their requests that are being answered.
        decode_s: seconds of a token of each of these requests.
        prompts: how many of the engines are computing a prompt.
    """

    rows: int = 0
    decode_s: float = 0.0
    prompts: int = 0


NO_OTHERS = Others()


class _Queue:
    """The turns that wait for the cores, in the order of arrival; the first one has the cores."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.turns: deque[EngineTurn] = deque()
        self.members: weakref.WeakSet[EngineTurn] = weakref.WeakSet()


#: One queue for the process: kernels and torch's matrix products use all cores.
_PROCESS = _Queue()


class EngineTurn:
    """An engine's turn, a context in which no other engine of the process computes.

    Engines enter in the order of their requests, so that two that always have work alternate.

    Args:
        queue: the engines that share the cores; None for those of the process.
        rules: the rules in its model (`Injection`). Only one forward at a time computes under them: an engine that
            computes under the same ones has its turn when that is over.
        draft_rules: the rules in its draft model; None without one.

    Attributes:
        rows: requests that the engine is answering, as others see them.
        decode_s: seconds that a token of each of them takes.
        passes_prompt: whether the engine is computing a prompt.
    """

    def __init__(self, queue: _Queue | None = None, rules: object = None, draft_rules: object = None) -> None:
        self._queue, self._rules = _PROCESS if queue is None else queue, rules
        self._draft_rules = draft_rules
        self._began = 0.0
        self.rows, self.decode_s, self.passes_prompt = 0, 0.0, False
        with self._queue.changed:
            self._queue.members.add(self)

    def __enter__(self) -> Self:
        with self._queue.changed:
            self._queue.turns.append(self)
            try:
                self._wait()
            except BaseException:
                self._leave()
                raise
        return self

    def __exit__(self, *raised: object) -> None:
        with self._queue.changed:
            self._leave()

    def pass_on(self, after_s: float) -> None:
        """Let waiting engines compute if this turn takes so long already; called within a forward, where it can pause.

        Those that compute under the same rules wait for the forward's end: they need the lock that it has.
        """
        turns = self._queue.turns
        if len(turns) > 1 and time.perf_counter() - self._began >= after_s:
            with self._queue.changed:
                locked = [each for each in turns if each is not self and each._computes_under(self._rules)]
                able = [each for each in turns if each is not self and each not in locked]
                if not able:
                    return
                turns.clear()
                turns.extend([*able, self, *locked])
                self._queue.changed.notify_all()
                # `__exit__` leaves the queue, however the wait ends.
                self._wait()

    def _computes_under(self, rules: object) -> bool:
        return rules is not None and (self._rules is rules or self._draft_rules is rules)

    def _wait(self) -> None:
        self._queue.changed.wait_for(lambda: self._queue.turns[0] is self)
        self._began = time.perf_counter()

    def _leave(self) -> None:
        self._queue.turns.remove(self)
        self._queue.changed.notify_all()

    @property
    def others(self) -> Others:
        """The other engines' work, as each reported it after its last step."""
        with self._queue.changed:
            others = [each for each in self._queue.members if each is not self]
        waiting = [each for each in others if each.rows]
        return Others(
            sum(each.rows for each in waiting),
            sum(each.decode_s for each in waiting),
            sum(each.passes_prompt for each in others),
        )
