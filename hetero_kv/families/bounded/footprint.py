"""The memory of a bounded layer: its policy's entries, whatever the sequence's length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetero_kv.adapter.footprint import FootprintTerm, LayerFootprint, MemoryDemand, MemoryShare, register, sums_share
from hetero_kv.families.bounded.entry_buffer import SLACK
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy
from hetero_kv.families.sparse_prefill.footprint import choice_share

ENTRIES = register(FootprintTerm("entries", "entries that eviction policies keep"))


@dataclass(frozen=True, kw_only=True)
class BoundedFootprint(LayerFootprint):
    """Entries on the compute device; `policy` determines their number."""

    policy: EvictionPolicy

    @property
    def place(self) -> str:
        return f"with a budget of {self.policy.settings.budget} entries ({self.policy.settings.policy})"

    @property
    def passes_in_strides(self) -> bool:
        return True

    @property
    def prefills_whole(self) -> bool:
        return not self.policy.strided

    def forward_tokens(self, tokens: int) -> int:
        stride = self.policy.stride(0, self.policy.budget_for(tokens))
        return tokens if stride is None else min(tokens, stride)

    def entries(self, tokens: int) -> int:
        """Largest number of entries, including those to which a rollback of the present turn returns."""
        kept = min(tokens, self.policy.budget_for(tokens))
        # Full prefill has its prompt in one layer at a time, unless all layers wait for each other.
        new = self.forward_tokens(tokens) if self.policy.strided or self.policy.evicts_after_all_layers else 0
        # Rotated keys, during decode before the budget is full: half the size of keys and values.
        rotated = kept // 2 if self.policy.reindexed else 0
        return 2 * kept + max(new, 2 * SLACK + rotated)

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        yield MemoryShare(ENTRIES, demand.sequences * self.kv_bytes(self.entries(demand.tokens), demand))
        yield choice_share(self.shape, self.policy.settings, demand)
        yield sums_share(demand.chunk_tokens, demand.tokens, self.shape, demand)
