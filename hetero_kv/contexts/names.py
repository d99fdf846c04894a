"""Checks names of contexts."""

from __future__ import annotations

from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import shown

LONGEST_NAME = 100


def require_name(name: str) -> None:
    """Raise ContextError for an invalid name."""
    if not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        raise ContextError(
            f"{shown(name, 80)} is not a name for a context; give up to {LONGEST_NAME} printable characters"
        )
