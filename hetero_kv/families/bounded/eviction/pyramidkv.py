"""PyramidKV (Cai et al. 2024, arXiv:2406.02069): SnapKV's vote, with budgets that decrease from layer to layer."""

from __future__ import annotations

from hetero_kv.families.bounded.eviction.policy_settings import PyramidKVSettings
from hetero_kv.families.bounded.eviction.snapkv import WindowVote


class PyramidKV(WindowVote[PyramidKVSettings]):
    """Budgets decrease linearly from the bottom layer to the top, with mean `budget` (section 3.2), over the layers
    that have this policy.

    As in the authors' code, a prompt shorter than what the bottom layer would keep gets `budget` in every layer.
    """

    def budget_for(self, prompt_length: int) -> int:
        budget, window = super().budget_for(prompt_length), self.settings.recent_tokens
        mean = budget - window
        if self.ranks == 1 or prompt_length <= max(budget, 2 * mean - 1):
            return budget
        # The bottom layer's distance above the mean; the top layer is as far below.
        steepness = min(mean - mean / self.settings.beta, prompt_length - window - mean)
        # Mirrored layers round alike, so their budgets sum to twice the mean.
        return budget + round(steepness * (self.ranks - 1 - 2 * self.rank) / (self.ranks - 1))
