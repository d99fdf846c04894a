"""What an engine tells about itself: its model, its capacity, its requests and its sequences."""

from __future__ import annotations

import time
from collections.abc import Mapping

from hetero_kv.engine.store import Store
from hetero_kv.serving.engine_loop import EngineLoop
from hetero_kv.serving.input_processor import InputProcessor
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.queues import Queues
from hetero_kv.serving.request import Request
from hetero_kv.serving.scheduler import Scheduler
from hetero_kv.serving.speculation.opening import Speculation
from hetero_kv.serving.status import EngineStatus, SequenceStatus, State


class EngineReport:
    """The part of an engine that reads its state; it changes nothing."""

    _store: Store
    _queues: Queues
    _prefixes: ResidentPrefixes
    _scheduler: Scheduler
    _speculation: Speculation
    _inputs: InputProcessor
    _loop: EngineLoop
    _max_batch: int
    _bytes_per_token: float
    _can_roll_back: bool

    @property
    def vocab_size(self) -> int:
        """Number of the model's logits."""
        return self._inputs.answers.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Capacity of a request, prompt and answer, tokens."""
        return self._store.capacity

    @property
    def speculation(self) -> str:
        """How tokens are guessed unless a request says; `off` if the model or its rules cannot verify guesses."""
        return self._speculation.in_effect()

    @property
    def ways(self) -> Mapping[str, str | None]:
        """The values of `speculation` that a request may give, each with the reason why it has no effect, or None."""
        return self._speculation.ways

    @property
    def ends(self) -> frozenset[int]:
        """The model's own end-of-turn tokens at this moment."""
        return self._inputs.answers.ends

    def status(self) -> EngineStatus:
        """The engine's present state. Any thread may call it, also during a step."""
        store = self._store
        free = min((each.unused_blocks * each.block_size for each in list(store.allocators.values())), default=None)
        capacity = store.tokens or store.capacity
        step_s, row_s = self._speculation.costs.line(self._max_batch)
        return EngineStatus(
            tuple(request.status(state) for state, request in self._requests()),
            kept_prefixes=self._prefixes.kept,
            capacity=capacity,
            free=capacity if free is None else min(free, capacity),
            dram_bytes=store.dram_bytes + self._speculation.dram_bytes,
            idle_s=time.monotonic() - self._scheduler.active_at,
            is_open=self._loop.is_open,
            max_batch=self._max_batch,
            prefill_tokens_per_s=self._scheduler.prefill_tokens_per_s,
            decode_step_s=step_s,
            decode_row_s=row_s,
            bytes_per_token=self._bytes_per_token,
            context_failures=0 if self._prefixes.stored is None else self._prefixes.stored.failures,
        )

    def sequences(self) -> list[SequenceStatus]:
        """The sequences that later prompts can reuse, now or after the requests; the most recently used first.

        Empty if a prompt that reuses a prefix is not computed exactly. Any thread may call it.
        """
        if not self._prefixes.are_shared:
            return []
        requests = [request.sequence(state, self._can_roll_back) for state, request in self._requests()]
        return requests + self._prefixes.sequences(self._can_roll_back)

    def _requests(self) -> list[tuple[State, Request]]:
        """All requests, each with its state. Any thread may call it."""
        return [*self._queues.by_state(), *(("waiting", each) for each in self._loop.new)]
