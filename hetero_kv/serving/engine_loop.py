"""The loop of an engine: requests come in from any thread, and one thread computes."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.arrivals import Arrivals
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.queues import Queues
from hetero_kv.serving.request import Request
from hetero_kv.serving.scheduler import Scheduler
from hetero_kv.serving.stream import ResultStream
from hetero_kv.serving.swapped import SwapFolder
from hetero_kv.serving.turns import EngineTurn

_logger = logging.getLogger(__name__)
# How long an engine's thread is idle before it writes a kept sequence to the disk, seconds.
_IDLE_S = 1.0
# How long a step without requests waits for one whose stored prefix is being fetched, seconds.
_ARRIVAL_S = 0.1
# How often `close` cancels what a step in progress computes, seconds.
_CANCEL_S = 0.02


class EngineLoop:
    """Accepts requests from any thread, and computes the scheduler's steps, one at a time.

    Args:
        scheduler: computes a step.
        queues: receives the requests.
        prefixes: the kept sequences, which are written to the disk while there is no request.
        swaps: the folder of preempted sequences, which `close` removes.
        turn: this engine's turn among those of the process.
        starts_thread: whether a thread of the loop computes. Otherwise `step` does.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        queues: Queues,
        prefixes: ResidentPrefixes,
        swaps: SwapFolder,
        turn: EngineTurn,
        *,
        starts_thread: bool,
    ) -> None:
        self._scheduler = scheduler
        scheduler.receive = self._receive
        self._queues = queues
        self._prefixes = prefixes
        self._swaps = swaps
        self._turn = turn
        self._arrivals = Arrivals(prefixes, self._arrive)
        self._new: deque[Request] = deque()
        # The callers that wait until the kept sequences are saved.
        self._saving: deque[Future[None]] = deque()
        self._changed = threading.Condition()
        self._stepping = threading.Lock()
        # For the steps of `step`: the interpreter raises KeyboardInterrupt in the main thread alone.
        self._steps = ThreadPoolExecutor(1, "hetero-kv step")
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if starts_thread:
            self._thread = threading.Thread(target=self._run, name="hetero-kv engine", daemon=True)
            self._thread.start()
            # A thread that computes while the interpreter ends would find half of it gone.
            atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        """Whether requests are answered: not closed, and the thread lives if there is one."""
        return not self._is_closed and (self._thread is None or self._thread.is_alive())

    @property
    def new(self) -> list[Request]:
        """Requests that no step has received yet."""
        return [*self._arrivals.waiting, *self._new]

    def new_stream(self) -> ResultStream[Any]:
        """A stream for a request. It can cancel the request; reading it computes if no thread does."""
        return ResultStream(self._arrivals.cancel, None if self._thread is not None else self.step)

    def submit(self, request: Request) -> ResultStream[Any]:
        """Accept a request. Returns its stream. Raises HeteroKVError if the loop is closed."""
        with self._changed:
            if self._is_closed:
                raise HeteroKVError("the engine is closed; create another one")
            self._arrivals.add(request)
        return request.stream

    def _arrive(self, request: Request) -> None:
        with self._changed:
            self._new.append(request)
            self._changed.notify_all()

    def step(self) -> bool:
        """Compute one step on another thread, so that Ctrl-C ends the wait for it, not the step.

        Returns whether there was anything to compute.
        """
        return not self._is_closed and self._steps.submit(self._step).result()

    def _step(self) -> bool:
        with self._stepping:
            if self._is_closed:
                return False
            self._receive()
            self._save()
            if not self._queues.all:
                self._prefixes.write_one()
                return self._has_arrivals()
            with self._turn:
                self._scheduler.step()
            return True

    def _has_arrivals(self) -> bool:
        """Whether requests are arriving; if no thread computes, waits a moment for one."""
        with self._changed:
            if self._thread is None and self._arrivals.waiting and not self._new:
                self._changed.wait(_ARRIVAL_S)
            return bool(self._arrivals.waiting or self._new)

    def _receive(self) -> None:
        with self._changed:
            while self._new:
                self._queues.waiting.append(self._new.popleft())

    def _has_requests(self) -> bool:
        return bool(self._is_closed or self._new or self._queues.all or self._saving)

    def _run(self) -> None:
        while True:
            with self._changed:
                # A request that closely follows an answer does not wait for the disk.
                self._changed.wait_for(self._has_requests, _IDLE_S if self._prefixes.is_writing else None)
                if self._is_closed:
                    return
            try:
                self._step()
            except Exception as error:
                # A bug: fail all requests, so that none waits for ever and the next one starts from a clean state.
                _logger.exception("a step of the engine failed")
                self._scheduler.fail_all(error)
                self._scheduler.report_load()

    def save_kept(self) -> None:
        """Write all kept sequences to the context folder, where there is one, before the next step."""
        saved: Future[None] = Future()
        with self._changed:
            if self._is_closed:
                return
            self._saving.append(saved)
            self._changed.notify_all()
        if self._thread is None:
            self.step()
        saved.result()

    def _save(self) -> None:
        """Write all kept sequences, if a caller waits for that."""
        while self._saving:
            saved = self._saving.popleft()
            try:
                while self._prefixes.is_writing:
                    self._prefixes.write_one()
            except Exception as error:
                saved.set_exception(error)
            else:
                saved.set_result(None)

    def close(self) -> None:
        """End all requests as cancelled, and the thread; free all blocks. Further calls do nothing."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._arrivals.close()
        while self._stepping.locked():
            # Again and again: one that comes from the arrivals, or moves between the queues, is in none for a moment.
            for request in self._queues.all:
                request.stream.is_cancelled = True
            time.sleep(_CANCEL_S)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._steps.shutdown()
        with self._stepping:
            self._receive()
            self._scheduler.retire_all()
            self._scheduler.report_load()
            self._save()
            while self._prefixes.drop_oldest():
                pass
            if self._prefixes.stored is not None:
                self._prefixes.stored.close()
            self._swaps.close()
