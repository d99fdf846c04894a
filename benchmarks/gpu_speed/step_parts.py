"""Splits the host's time of a decoded token into parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from hetero_kv.engine import deferred_readback
from hetero_kv.families.retrieval.decode import RetrievalDecode
from hetero_kv.families.retrieval.resident_decode import ResidentDecode
from hetero_kv.families.shadowkv.device_decode import ChunkLoading
from hetero_kv.gpu_ops.staging import Staging

#: The wait for what a token leaves, once per token.
WAITING = "waits for the token"
#: Part -> the calls whose time it is. The rest is the model's forward and kernel launches.
_PARTS: dict[str, tuple[Any, str]] = {
    WAITING: (deferred_readback, "on_host"),
    "waits for queries": (Staging, "arrived"),
    "attends on the CPU": (RetrievalDecode, "_attend_natively"),
    "prepares attention on the GPU": (ResidentDecode, "_prepare_token"),
    "asks for values": (ChunkLoading, "__init__"),
    "asks for keys": (ChunkLoading, "finished"),
}
REST = "the model, launches"


@contextmanager
def timed(parts: dict[str, float]) -> Iterator[None]:
    """Within this context the seconds of each part are added up in `parts`."""
    with ExitStack() as stack:
        for name, (owner, method) in _PARTS.items():
            parts[name] = 0.0
            stack.enter_context(patch.object(owner, method, _counting(getattr(owner, method), parts, name)))
        yield


def _counting(function: Callable[..., Any], parts: dict[str, float], name: str) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            parts[name] += time.perf_counter() - start

    return counting


def shares(parts: dict[str, float], seconds: float, tokens: int) -> dict[str, float]:
    """Milliseconds per token of each part that occurred, and of the rest of `seconds`."""
    met = {name: spent for name, spent in parts.items() if spent}
    return {name: spent / tokens * 1e3 for name, spent in {**met, REST: seconds - sum(met.values())}.items()}
