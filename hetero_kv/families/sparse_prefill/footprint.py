"""The GPU memory in which a sparse prefill chooses keys."""

from __future__ import annotations

from hetero_kv.adapter.footprint import FOLLOWING, MemoryDemand, MemoryShare
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.families.sparse_prefill.device_chunk import working_bytes
from hetero_kv.families.sparse_prefill.settings import PrefillSettings


def choice_share(shape: KVShape, settings: object, demand: MemoryDemand) -> MemoryShare:
    """What a layer with such keys and values takes beside its attention: nothing for a dense prefill, or on a CPU."""
    chooses = demand.on_gpu and isinstance(settings, PrefillSettings) and settings.prefills_sparsely
    counts = demand.chunk_tokens, demand.tokens, demand.batch, demand.heads, shape, demand.element
    return MemoryShare(FOLLOWING, working_bytes(*counts) if chooses else 0, common=True)
