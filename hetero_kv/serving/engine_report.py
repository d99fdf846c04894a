"""What an engine is doing: its capacity, its requests and its sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hetero_kv.engine.store import Store
from hetero_kv.serving.engine_loop import EngineLoop
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.queues import Queues
from hetero_kv.serving.request import Request
from hetero_kv.serving.scheduler import Scheduler
from hetero_kv.serving.speculation.speculation import Speculation
from hetero_kv.serving.status import EngineStatus, SequenceStatus, State


@dataclass(frozen=True)
class EngineReport:
    """Reads the parts of an engine, and changes nothing. Any thread may call it, also during a step.

    Attributes:
        store, queues, prefixes, scheduler, speculation, loop: the engine's.
        max_batch: the most requests that are answered at a time.
        bytes_per_token: of keys and values, bytes.
        can_roll_back: whether all layers can roll back to any token.
    """

    store: Store
    queues: Queues
    prefixes: ResidentPrefixes
    scheduler: Scheduler
    speculation: Speculation
    loop: EngineLoop
    max_batch: int
    bytes_per_token: float
    can_roll_back: bool

    def status(self) -> EngineStatus:
        """The engine's present state."""
        store, stored = self.store, self.prefixes.stored
        free = min((each.unused_blocks * each.block_size for each in list(store.allocators.values())), default=None)
        capacity = store.tokens or store.capacity
        step_s, row_s = self.speculation.costs.line(self.max_batch)
        return EngineStatus(
            tuple(request.status(state) for state, request in self._requests()),
            kept_prefixes=self.prefixes.kept,
            capacity=capacity,
            free=capacity if free is None else min(free, capacity),
            dram_bytes=store.dram_bytes + self.speculation.dram_bytes,
            idle_s=time.monotonic() - self.scheduler.active_at,
            is_open=self.loop.is_open,
            max_batch=self.max_batch,
            prefill_tokens_per_s=self.scheduler.prefill_tokens_per_s,
            decode_step_s=step_s,
            decode_row_s=row_s,
            bytes_per_token=self.bytes_per_token,
            context_failures=0 if stored is None else stored.failures,
        )

    def sequences(self) -> list[SequenceStatus]:
        """The sequences that later prompts can reuse, now or after the requests; the most recently used first.

        Empty if a prompt that reuses a prefix is not computed exactly.
        """
        if not self.prefixes.are_shared:
            return []
        requests = [request.sequence(state, self.can_roll_back) for state, request in self._requests()]
        return requests + self.prefixes.sequences(self.can_roll_back)

    def _requests(self) -> list[tuple[State, Request]]:
        """All requests, each with its state."""
        return [*self.queues.by_state(), *(("waiting", each) for each in self.loop.new)]
