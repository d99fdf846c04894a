"""Attention and other work of the host during a capture: recorded as work between segments.

Attention that needs no host is captured too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from hetero_kv.adapter.cache_argument import CACHE_NAMES
from hetero_kv.gpu_ops.graph_segments import GraphSegments
from hetero_kv.gpu_ops.host_traffic import HostTraffic

if TYPE_CHECKING:
    from hetero_kv.adapter.bridge import AttentionCall, AttentionHandler
    from hetero_kv.adapter.operator import AttentionOperator
    from hetero_kv.engine.cache import HeteroCache

#: Attends with the captured queries, keys and values of a token, over a cache.
Work = Callable[["HeteroCache"], torch.Tensor]


class NotCapturableError(RuntimeError):
    """A forward has a part that cannot be captured, which the message names."""


@runtime_checkable
class CapturableAttention(Protocol):
    """An operator whose attention can be captured: its kernels find what changes by data at fixed addresses."""

    layer_idx: int

    def prepare_captured(self, cache: HeteroCache) -> None:
        """The host's part of a token of the cache's steps, before its forward is launched."""

    def attend_captured(self, cache: HeteroCache, call: AttentionCall) -> torch.Tensor:
        """The attention of a token, [batch, heads, 1, v_dim]; launches kernels only.

        There may be more rows than the cache has, up to those of its bucket (`engine.row_buckets`).
        """


class HostWork(Protocol):
    """Work of the host within a forward, on numbers from the GPU."""

    @property
    def has_work_beside(self) -> bool:
        """Whether the GPU has work meanwhile."""

    def send(self) -> None:
        """Start to copy the numbers to the host."""

    def beside(self) -> None:
        """Launch the GPU's work, if there is any."""

    def result(self, rows: int | None = None) -> torch.Tensor:
        """Wait for the numbers, and compute the result. Returns a tensor on the GPU, which the next call overwrites.

        rows: those in use, the first ones; None for all.
        """


class GraphRecording:
    """A decoded token's forward, in which attention that needs the host is recorded as functions.

    Args:
        cache: a cache of the store to whose memory the capture belongs, so that attention is captured where the
            layers' `captured_memory` says so; None records every attention.

    Attributes:
        between: in order, the function that computes what follows each segment, and the buffer for its result that the
            next segment reads; None without a result.
        prepared: the operators whose attention is captured.
        attentions: the number of attention calls.
    """

    def __init__(self, segments: GraphSegments, cache: HeteroCache | None = None) -> None:
        self._segments, self._cache = segments, cache
        self.between: list[tuple[Work | Callable[[HeteroCache], None], torch.Tensor | None]] = []
        self.prepared: list[CapturableAttention] = []
        self.attentions = 0
        self._before: Callable[[HeteroCache], Any] | None = None

    def read_length(self) -> None:
        """Called when the model reads the number of stored tokens, other than for a mask. Raises NotCapturableError."""
        raise NotCapturableError("the model reads the number of stored tokens, which changes with every token")

    def record_arguments(
        self, operator: AttentionOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments for the captured attention module. Every token calls the operator's `arguments_for` before its
        attention.

        Raises NotCapturableError when the arguments differ from token to token.
        """
        # Without the cache, which may differ at the next token.
        name = next((name for name in CACHE_NAMES if name in kwargs), CACHE_NAMES[0])
        others = {other: value for other, value in kwargs.items() if other != name}
        self._before = lambda cache: operator.arguments_for(args, {**others, name: cache})
        return operator.lasting_arguments(kwargs)

    def attended(self, operator: AttentionHandler, call: AttentionCall) -> torch.Tensor:
        """The attention of a call, [batch, heads, tokens, v_dim], or its buffer; every token computes it again."""
        before, self._before = self._before, None
        self.attentions += 1
        cache = self._cache
        if (
            cache is not None
            and isinstance(operator, CapturableAttention)
            and captured_memory(cache, operator.layer_idx) is not None
        ):
            self.prepared.append(operator)
            return operator.attend_captured(cache, call)

        def work(cache: HeteroCache) -> torch.Tensor:
            if before is not None:
                before(cache)
            return operator.attend(cache, call)

        with self._segments.interrupted():
            out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
        self.between.append((work, out))
        return out

    def computed_by_host(self, work: HostWork, like: torch.Tensor) -> torch.Tensor:
        """The buffer for the work's result, of the shape and dtype of `like`; every token computes it again."""
        if work.has_work_beside:
            with self._segments.interrupted():
                pass
            self.between.append((lambda _: work.send(), None))
            work.beside()
            with self._segments.interrupted():
                out = torch.empty_like(like)
            self.between.append((lambda cache: work.result(cache.required_batch.sequences), out))
            return out

        def both(cache: HeteroCache) -> torch.Tensor:
            work.send()
            return work.result(cache.required_batch.sequences)

        with self._segments.interrupted():
            out = torch.empty_like(like)
        self.between.append((both, out))
        return out

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """A context of work that is not captured, such as the allocation of buffers that the host writes."""
        with self._segments.interrupted():
            yield
        self.between.append((lambda _: None, None))


def captured_memory(cache: HeteroCache, layer_idx: int) -> Any:
    """See `FamilyLayer.captured_memory`, for all rows of a forward; None if theirs differ."""
    first, *others = (
        getattr(step.group.layers[layer_idx], "captured_memory", None) for step in cache.required_batch.steps
    )
    return first if all(other is first for other in others) else None


class Rehearsal:
    """A decoded token's forward without a capture, which detects everything that would prevent a capture.

    The parts that a recording skips are not observed.

    Args:
        cache: the cache of the forward.
    """

    def __init__(self, cache: HeteroCache, traffic: HostTraffic) -> None:
        self._cache, self._traffic = cache, traffic

    def read_length(self) -> None:
        """See GraphRecording; allowed."""

    def record_arguments(
        self, operator: AttentionOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments for an attention module."""
        with self._traffic.unobserved():
            return operator.arguments_for(args, kwargs)

    def attended(self, operator: AttentionHandler, call: AttentionCall) -> torch.Tensor:
        """The attention of a call, [batch, heads, tokens, v_dim]."""
        with self._traffic.unobserved():
            return operator.attend(self._cache, call)

    def computed_by_host(self, work: HostWork, like: torch.Tensor) -> torch.Tensor:
        """The work's result, in the dtype of `like`."""
        with self._traffic.unobserved():
            work.send()
        work.beside()
        with self._traffic.unobserved():
            return work.result().to(like.dtype, copy=True)

    def uncaptured(self) -> AbstractContextManager[None]:
        """See GraphRecording."""
        return self._traffic.unobserved()


_PRESENT: ContextVar[GraphRecording | Rehearsal | None] = ContextVar("present recording", default=None)


@contextmanager
def recording(present: GraphRecording | Rehearsal) -> Iterator[None]:
    """A context whose forward is recorded by `present`, for modules that do not get the cache."""
    token = _PRESENT.set(present)
    try:
        yield
    finally:
        _PRESENT.reset(token)


def computed_by_host(work: HostWork, like: torch.Tensor) -> torch.Tensor:
    """The result of the host's work, in the dtype of `like`; in a recorded forward, the buffer for it."""
    present = _PRESENT.get()
    if present is not None:
        return present.computed_by_host(work, like)
    work.send()
    work.beside()
    return work.result().to(like.dtype, copy=True)


def is_captured() -> bool:
    """Whether the forward is being captured, in which the host must not wait."""
    return isinstance(_PRESENT.get(), GraphRecording)


def allocating() -> AbstractContextManager[None]:
    """A context that allocates buffers for the host's work, in a forward that may be recorded."""
    present = _PRESENT.get()
    return nullcontext() if present is None else present.uncaptured()
