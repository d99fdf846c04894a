"""Traced QKV: the queries, keys and values that an attention module passes to its attention function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetero_kv.adapter import bridge
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import UnsupportedModelError


class _AttentionReached(Exception):
    """Aborts the module at its attention call."""

    def __init__(self, call: bridge.AttentionCall) -> None:
        super().__init__()
        self.call = call


class _QKVTracer:
    def attend(self, cache: Any, call: bridge.AttentionCall) -> torch.Tensor:
        raise _AttentionReached(call)


@torch.no_grad()
def traced_call(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bridge.AttentionCall:
    """The queries, keys and values that an attention module computes from a forward's arguments.

    Nothing is stored, attended or projected: an exception leaves the module at its attention call. Raises
    UnsupportedModelError, naming `path`, for a module without such a call.
    """
    without_cache = [None if isinstance(value, HeteroCache) else value for value in args]
    others = {name: None if isinstance(value, HeteroCache) else value for name, value in kwargs.items()}
    with bridge.handled_by(_QKVTracer()):
        try:
            module(*without_cache, **others)
        except _AttentionReached as reached:
            return reached.call
    raise UnsupportedModelError(f"{path} ({type(module).__name__}) did not call its attention function")
