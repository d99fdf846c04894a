"""Begins to read a command's model while the process imports what computes with it."""

from __future__ import annotations

from hetero_kv.models import ahead
from hetero_kv.planning.free_memory import free_dram

# The share of the free DRAM that weights may fill by then. With more, plans of memory would count them twice.
_SHARE = 0.1


def read_ahead(model: str | None, gguf_path: str | None, *, with_weights: bool = True) -> None:
    """Begin to read what earlier starts have kept of a model, as `load_model` takes it, or of the default model."""
    ahead.begin(model, gguf_path, most_bytes=round(_SHARE * free_dram()) if with_weights else 0)
