"""The work between captured segments: recorded during the capture, and run for every token."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

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

#: The recording in progress, or its rehearsal.
RECORDING: ContextVar[GraphRecording | Rehearsal | None] = ContextVar("hetero_kv_recording", default=None)


class NotCapturableError(RuntimeError):
    """A forward has a part that cannot be captured, which the message names."""


class GraphRecording:
    """A decoded token's forward without its attentions, which are recorded as functions.

    Attributes:
        attentions: in order, the function that computes each attention, and the buffer for its result that the next
            captured segment reads.
    """

    def __init__(self, segments: GraphSegments) -> None:
        self._segments = segments
        self.attentions: list[tuple[Work, torch.Tensor]] = []
        self._before: Callable[[HeteroCache], Any] | None = None

    def record_arguments(
        self, operator: AttentionOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments for the captured attention module. Every token calls the operator's `arguments_for` before its
        attention.

        Raises NotCapturableError when the arguments differ from token to token.
        """
        # Without the cache, which may be another one at the next token.
        name = next((name for name in CACHE_NAMES if name in kwargs), CACHE_NAMES[0])
        others = {other: value for other, value in kwargs.items() if other != name}
        self._before = lambda cache: operator.arguments_for(args, {**others, name: cache})
        return operator.lasting_arguments(kwargs)

    def attended(self, operator: AttentionHandler, call: AttentionCall) -> torch.Tensor:
        """The buffer for the attention of a call, [batch, heads, tokens, v_dim], which every token computes again."""
        before, self._before = self._before, None

        def work(cache: HeteroCache) -> torch.Tensor:
            if before is not None:
                before(cache)
            return operator.attend(cache, call)

        with self._segments.interrupted():
            out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
        self.attentions.append((work, out))
        return out


class Rehearsal:
    """A decoded token's forward without a capture, in which everything that would prevent a capture is noticed.

    The parts that a recording leaves out are not observed.

    Args:
        cache: the cache of the forward.
    """

    def __init__(self, cache: HeteroCache, traffic: HostTraffic) -> None:
        self._cache, self._traffic = cache, traffic

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
