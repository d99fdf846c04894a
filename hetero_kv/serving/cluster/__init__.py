"""Several machines as one: which replica answers a request, and what replicas tell of themselves."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    # Lazy, for it needs Ray, and the server above this package.
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("hetero_kv.server.cluster.application").app
