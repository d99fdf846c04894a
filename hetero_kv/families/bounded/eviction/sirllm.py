"""SirLLM (Yao et al. 2024, arXiv:2405.12528): keeps the tokens that the model expected least, by their entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.families.bounded.eviction.registry import register
from hetero_kv.families.bounded.eviction.settings import StridedSettings, policy_setting
from hetero_kv.settings.setting import setting


@dataclass(frozen=True)
class SirLLMSettings(StridedSettings):
    """SirLLM: attention sinks, the least expected tokens and the newest."""

    policy: str = policy_setting("sirllm")
    sink_tokens: int = setting(
        4, "first tokens of the sequence, always kept", unit="tokens", minimum=0, formerly=("sinks",)
    )
    recent_ratio: float = setting(0.25, "share of the budget for the newest tokens", minimum=0, maximum=1)
    decay_ratio: float = setting(
        1.0, "factor of the entropy of earlier tokens at every new turn; 1: memory does not fade", minimum=0, maximum=1
    )

    @property
    def least(self) -> int:
        return self.sink_tokens + 1


@register(
    "sirllm",
    meaning="attention sinks, the tokens that the model expected least, and the newest; at positions 0, 1, …",
    settings=SirLLMSettings,
)
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
