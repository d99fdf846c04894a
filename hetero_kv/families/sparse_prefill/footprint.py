"""The GPU memory in which a sparse prefill chooses keys."""

from __future__ import annotations

from hetero_kv.adapter.footprint import FOLLOWING, MemoryDemand, MemoryShare
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.families.sparse_prefill import minference
from hetero_kv.families.sparse_prefill.device_chunk import working_bytes
from hetero_kv.families.sparse_prefill.settings import PrefillSettings

#: Float32 copies of a searched query's attention: expected, found, their difference and its square.
_SEARCHED_BYTES = 16


def choice_share(shape: KVShape, settings: object, demand: MemoryDemand) -> MemoryShare:
    """What a layer with such keys and values takes beside its attention: nothing for a dense prefill, or on a CPU."""
    size = 0
    if demand.on_gpu and isinstance(settings, PrefillSettings) and settings.prefills_sparsely:
        counts = demand.tokens, demand.batch, demand.heads, shape, demand.element
        size = working_bytes(demand.chunk_tokens, *counts)
        if settings.prefill == "minference":
            queries = min(minference.TRIED_QUERIES, demand.tokens)
            size = max(size, working_bytes(queries, *counts) + _search_bytes(queries, shape, demand))
    return MemoryShare(FOLLOWING, size, common=True)


def _search_bytes(queries: int, shape: KVShape, demand: MemoryDemand) -> int:
    """What the search of patterns has of its queries, and of their attention, beside the choice of their keys."""
    # Those of the chunks before, and both together with the last chunk's.
    kept = 3 * (shape.k_dim + shape.v_dim) * demand.element
    return demand.batch * demand.heads * queries * (kept + shape.v_dim * _SEARCHED_BYTES)
