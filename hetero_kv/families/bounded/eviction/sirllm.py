"""SirLLM (Yao et al. 2024, arXiv:2405.12528): keeps the tokens that the model expected least, by their entropy."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cross_entropy

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy
from hetero_kv.families.bounded.eviction.policy_settings import SirLLMSettings
from hetero_kv.families.bounded.eviction.ranking import best


class SirLLM(EvictionPolicy[SirLLMSettings]):
    """Ranks tokens by their entropy -log P(token | previous tokens), equally for all heads and layers (section 3).

    At the beginning of each turn the entropy of cached tokens is multiplied by the decay ratio, so that memory fades.
    """

    strided = True
    reindexed = True
    needs_logits = True

    def begin_turn(self, entries: Entries) -> Entries:
        faded = entries.score("token") * self.settings.decay_ratio
        # The first token's entropy is infinite; multiplied by 0 it is NaN.
        return entries.scored(token=faded.nan_to_num(nan=0.0, posinf=math.inf))

    def token_scores(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Entropy in nats; see EvictionPolicy."""
        return cross_entropy(logits.transpose(1, 2), tokens, reduction="none")

    def evict(self, entries: Entries, budget: int) -> Entries:
        sinks = self.settings.sink_tokens
        recent = min(round(budget * self.settings.recent_ratio), budget - sinks)
        # One set for all heads, because the entropy belongs to the token.
        entropy = entries.score("token")[:, :1]
        return entries.kept(best(entropy, budget, first=sinks, last=recent))
