"""What the kernels compute that bring blocks or chunks to slots; `kernels` has the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetero_kv.gpu_ops.resident_slots import divided_in_torch, fetch_in_torch, placed_in_torch


def _place(resident: Any, chosen: Any, after: Any, misses: Any, into: Any, missed: Any, *_: Any, **__: Any) -> None:
    for out, computed in zip((after, misses, into), placed_in_torch(resident, chosen, missed), strict=True):
        out.copy_(computed)


def _divide(
    ids: Any, misses: Any, into: Any, missed: Any, attended: Any, listed: Any, early: Any, late: Any, count: int,
    kv_heads: int, share: float, **_: Any,
) -> None:  # fmt: skip
    found = divided_in_torch(ids, misses, into, missed, share, attended, listed)
    for out, each in zip((early, late), found, strict=True):
        out.copy_(each)


def _fetch(stored: Any, table: Any, misses: Any, into: Any, out: Any, *_: Any, **__: Any) -> None:
    fetch_in_torch(stored, table, misses, into, out)


#: As in `kernels`.
DEFINITIONS: dict[str, Callable[..., None]] = {"_place": _place, "_divide": _divide, "_fetch": _fetch}
WRITTEN: dict[str, tuple[str, ...]] = {
    "_place": ("after", "misses", "into", "missed"),
    "_divide": ("attended", "listed", "early", "late"),
    "_fetch": ("out",),
}
