"""What a forward does between its captured segments: noted while they are captured, done anew for every token."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from gpu_ops.captured import Segments
from gpu_ops.host_traffic import HostTraffic
from hetero_kv.adapter.cache_argument import CACHE_NAMES

if TYPE_CHECKING:
    from hetero_kv.adapter.bridge import AttentionCall, Serving
    from hetero_kv.adapter.operator import AttentionOperator
    from hetero_kv.engine.cache import HeteroCache

#: What a cache's layers do with the captured queries, keys and values of a token, and its attention.
Work = Callable[["HeteroCache"], torch.Tensor]

#: The recording that is under way, or its rehearsal.
RECORDING: ContextVar[Recording | Rehearsal | None] = ContextVar("hetero_kv_recording", default=None)


class NotCapturableError(RuntimeError):
    """A forward has what cannot be captured; the message says what."""


class Recording:
    """A decoded token's forward, of which every attention is left out and noted.

    Attributes:
        attentions: in order, what computes each of them, and where that is to lie for what is captured behind it.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.attentions: list[tuple[Work, torch.Tensor]] = []
        self._before: Callable[[HeteroCache], Any] | None = None

    def noted_arguments(
        self, operator: AttentionOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """What an attention module is to be called with; its operator sees these before its attention is computed.

        Raises NotCapturableError where that would be others for every token.
        """
        # Not the cache, which is another's at the next token.
        name = next((name for name in CACHE_NAMES if name in kwargs), CACHE_NAMES[0])
        held = {other: value for other, value in kwargs.items() if other != name}
        self._before = lambda cache: operator.arguments_for(args, {**held, name: cache})
        return operator.lasting_arguments(kwargs)

    def attended(self, operator: Serving, call: AttentionCall) -> torch.Tensor:
        """Where the attention of a call will lie, [batch, heads, tokens, v_dim]; it is computed for every token."""
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
    """A decoded token's forward that runs as it is, of which that is noticed which could not be captured.

    What a recording leaves out is not.

    Args:
        cache: the one that the forward is given.
    """

    def __init__(self, cache: HeteroCache, traffic: HostTraffic) -> None:
        self._cache, self._traffic = cache, traffic

    def noted_arguments(
        self, operator: AttentionOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """What an attention module is to be called with."""
        with self._traffic.unnoticed():
            return operator.arguments_for(args, kwargs)

    def attended(self, operator: Serving, call: AttentionCall) -> torch.Tensor:
        """The attention of a call, [batch, heads, tokens, v_dim]."""
        with self._traffic.unnoticed():
            return operator.attend(self._cache, call)
