"""What an engine is doing, for metrics and health checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

State = Literal["answering", "prefilling", "waiting"]


class RequestStatus(NamedTuple):
    """One request of an engine.

    Attributes:
        state: "waiting", "prefilling" or "answering".
        prompt_tokens: the prompt's number of tokens.
        processed_tokens: how many of them are computed.
        answer_tokens: tokens of the answer so far.
    """

    state: State
    prompt_tokens: int
    processed_tokens: int
    answer_tokens: int


class SequenceStatus(NamedTuple):
    """A sequence that an engine has in memory, or will have, for later prompts with the same prefix.

    Attributes:
        owner: an object that lives as long as the sequence has these tokens.
        tokens: ids; of a request those of its prompt.
        state: a request's, or "kept" for the sequence of an ended one.
        missing: how many of the tokens are not computed yet.
        lengths: the prefix lengths that a later prompt can reuse, tokens; None for any.
        tenant: the request's.
        is_stored: whether it is in the context folder.
    """

    owner: object
    tokens: Sequence[int]
    state: State | Literal["kept"]
    missing: int = 0
    lengths: Sequence[int] | None = None
    tenant: str = ""
    is_stored: bool = False


@dataclass(frozen=True)
class EngineStatus:
    """An engine at one moment.

    Attributes:
        requests: those that have not ended.
        kept_prefixes: ended requests whose sequences are in memory.
        capacity: tokens that fit into the store.
        free: tokens for which there are free blocks; blocks of kept sequences are not free.
        dram_bytes: DRAM of the blocks that were ever used, bytes.
        idle_s: seconds since a step began or ended, or a chunk of a prompt was done.
        is_open: whether the engine takes requests and its thread, where it has one, runs.
        max_batch: the most requests that are answered at a time.
        prefill_tokens_per_s: tokens of new prompts computed per second; None before the first ones.
        decode_step_s: seconds of a decode step of one request; None before steps were measured.
        decode_row_s: seconds that each further request adds to a step, up to `max_batch`.
        bytes_per_token: of keys and values, bytes.
        context_failures: how often saved contexts could not be looked up, fetched, loaded or stored.
    """

    requests: tuple[RequestStatus, ...]
    kept_prefixes: int
    capacity: int
    free: int
    dram_bytes: int
    idle_s: float
    is_open: bool
    max_batch: int
    prefill_tokens_per_s: float | None
    decode_step_s: float | None
    decode_row_s: float
    bytes_per_token: float
    context_failures: int

    def is_stuck(self, seconds: float) -> bool:
        """Whether requests wait and nothing has happened for `seconds`."""
        return bool(self.requests) and self.idle_s > seconds


def together(statuses: Sequence[EngineStatus]) -> EngineStatus:
    """The status of several engines together; without any, that of a closed engine."""

    def total(name: str) -> Any:
        return sum(getattr(each, name) for each in statuses)

    return EngineStatus(
        tuple(request for each in statuses for request in each.requests),
        kept_prefixes=total("kept_prefixes"),
        capacity=total("capacity"),
        free=total("free"),
        dram_bytes=total("dram_bytes"),
        idle_s=min((each.idle_s for each in statuses), default=0.0),
        is_open=any(each.is_open for each in statuses),
        max_batch=total("max_batch"),
        prefill_tokens_per_s=sum(each.prefill_tokens_per_s or 0.0 for each in statuses) or None,
        decode_step_s=min((each.decode_step_s for each in statuses if each.decode_step_s is not None), default=None),
        decode_row_s=min((each.decode_row_s for each in statuses), default=0.0),
        bytes_per_token=max((each.bytes_per_token for each in statuses), default=0.0),
        context_failures=total("context_failures"),
    )
