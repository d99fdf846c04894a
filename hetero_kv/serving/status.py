"""What an engine is doing, for metrics and health checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RequestStatus(NamedTuple):
    """One request of an engine.

    Attributes:
        state: "waiting", "prefilling" or "answering".
        prompt_tokens: the prompt's number of tokens.
        processed_tokens: how many of them have passed.
        answer_tokens: tokens of the answer so far.
    """

    state: str
    prompt_tokens: int
    processed_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class EngineStatus:
    """An engine at one moment.

    Attributes:
        requests: those that have not ended.
        kept_prefixes: ended requests whose sequences are in memory.
        capacity: tokens that fit into the store.
        free: tokens for which there are free blocks; blocks of kept sequences are not free.
        dram_bytes: DRAM of the blocks that were ever used, bytes.
        idle_s: seconds since a step began or ended, or a chunk of a prompt passed.
        is_open: whether the engine takes requests and its thread, where it has one, runs.
    """

    requests: tuple[RequestStatus, ...]
    kept_prefixes: int
    capacity: int
    free: int
    dram_bytes: int
    idle_s: float
    is_open: bool

    def is_stuck(self, seconds: float) -> bool:
        """Whether requests wait and nothing has happened for so long."""
        return bool(self.requests) and self.idle_s > seconds
