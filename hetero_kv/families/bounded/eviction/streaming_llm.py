"""StreamingLLM (Xiao et al. 2023, arXiv:2309.17453): attention sinks and the newest tokens."""

from __future__ import annotations

import functools

import torch

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy
from hetero_kv.families.bounded.eviction.policy_settings import StreamingLLMSettings


class StreamingLLM(EvictionPolicy[StreamingLLMSettings]):
    """Keeps the first `sink_tokens` and the newest entries; positions are those within the cache (section 3.2)."""

    strided = True
    reindexed = True

    def evict(self, entries: Entries, budget: int) -> Entries:
        return entries.kept(
            _sinks_and_newest(self.settings.sink_tokens, budget, entries.num_entries, entries.room.keys.device)
        )


@functools.lru_cache(maxsize=16)
def _sinks_and_newest(sinks: int, budget: int, cached: int, device: torch.device) -> torch.Tensor:
    """Indices [1, 1, budget] of sinks and newest entries: the same for all layers, and for every decoded token."""
    first = torch.arange(sinks, device=device)
    newest = torch.arange(cached - (budget - sinks), cached, device=device)
    return torch.cat([first, newest])[None, None]
