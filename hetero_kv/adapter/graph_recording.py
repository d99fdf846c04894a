"""Attention during a capture: recorded as work between segments, or captured too if it needs no host."""

from __future__ import annotations

from collections.abc import Callable
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
    """An operator whose attention can be captured: its kernels read changing data from fixed addresses."""

    layer_idx: int

    def prepare_captured(self, cache: HeteroCache) -> None:
        """The host's part of a token of the cache's one step, before its forward is launched."""

    def attend_captured(self, cache: HeteroCache, call: AttentionCall) -> torch.Tensor:
        """The attention of a token, [batch, heads, 1, v_dim]; launches kernels only."""


class GraphRecording:
    """A decoded token's forward, in which attention that needs the host is recorded as functions.

    Args:
        cache: the cache to whose memory the capture belongs, so that attention is captured where a layer's
            `captured_memory` says so; None records every attention.

    Attributes:
        attentions: in order, the function that computes each attention, and the buffer for its result that the next
            captured segment reads.
        prepared: the operators whose attention is captured.
    """

    def __init__(self, segments: GraphSegments, cache: HeteroCache | None = None) -> None:
        self._segments, self._cache = segments, cache
        self.attentions: list[tuple[Work, torch.Tensor]] = []
        self.prepared: list[CapturableAttention] = []
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
        self.attentions.append((work, out))
        return out


def captured_memory(cache: HeteroCache, layer_idx: int) -> int | None:
    """See `FamilyLayer.captured_memory`; None if the forward has several groups."""
    steps = cache.required_batch.steps
    if len(steps) != 1:
        return None
    memory: int | None = getattr(steps[0].group.layers[layer_idx], "captured_memory", None)
    return memory


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
