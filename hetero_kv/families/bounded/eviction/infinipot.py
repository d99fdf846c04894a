"""InfiniPot (Kim et al. 2024, arXiv:2410.01518): a pot that is distilled whenever it is full."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import InfiniPotSettings
from hetero_kv.families.bounded.eviction.ranking import best


class InfiniPot(EvictionPolicy[InfiniPotSettings]):
    """Continual context distillation (section 3.2): tokens fill the pot; when it is full a share of it stays.

    Of these, the `nuc_ratio` with the highest cross-entropy are taken first, the others by the attention of the
    catalyst's tokens, summed over them and averaged over the group (appendix B). The most novel tokens are the same for
    all heads, as in the paper, although heads keep different entries: every head always keeps the most novel tokens.

    Positions are 0, 1, … within the cache (CR-RoPE, section 3.5).
    """

    strided = True
    reindexed = True
    needs_logits = True

    def stride(self, cached: int, budget: int) -> int:
        """The remaining capacity of the pot; see EvictionPolicy."""
        return budget - cached

    @property
    def most_entries(self) -> int | None:
        return None if isinstance(self.settings.budget, float) else self.settings.budget

    def is_due(self, cached: int, budget: int) -> bool:
        """Whether the pot is full, before it overflows; see EvictionPolicy."""
        return cached >= budget

    def token_scores(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Novelty under compression (eq. 3), given what the layers had cached before the token: cross-entropy, nats."""
        return cross_entropy(logits.transpose(1, 2), tokens, reduction="none")

    def catalyst_text(self) -> str:
        return self.settings.catalyst_text

    def observe_catalyst(self, entries: Entries, attended: ObservedAttention) -> Entries:
        """Accumulate the representative score, eq. 2."""
        received = attended.column_sums()[..., : entries.num_entries].mean(dim=2)
        begins = attended.keys.shape[2] - attended.tokens == entries.num_entries
        return entries.scored(representative=received if begins else entries.score("representative") + received)

    def evict(self, entries: Entries, budget: int) -> Entries:
        """Distil the pot (section 3.3.3); see EvictionPolicy."""
        stay = min(budget - 1, max(1, int(budget * self.settings.kept_ratio)))
        novel = best(entries.score("token"), round(stay * self.settings.nuc_ratio))
        importance = entries.score("representative").scatter(-1, novel, float("inf"))
        return entries.kept(best(importance, stay))
