"""SnapKV (Li et al. 2024, arXiv:2404.14469): the prompt's last queries vote for entries."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.nn.functional import avg_pool1d

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import SnapKVSettings
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.families.retrieval.observation import Observation

V = TypeVar("V", bound=SnapKVSettings)


class WindowVote(EvictionPolicy[V]):
    """Votes of an observation window: the attention of the prompt's last queries, pooled along entries, averaged over
    the group (section 4).

    During an answer an entry keeps its vote from the prompt. A generated entry has the attention that it received while
    it was among the newest `recent_tokens`, which are kept: an equal number of queries has voted on each.
    """

    def observe(self, entries: Entries, attended: ObservedAttention) -> Entries:
        window = self.settings.recent_tokens
        if not attended.is_decoded:
            carried = entries.carried.get("window")
            observation = carried or Observation(self.settings.observed(attended.question))
            return entries.carrying(
                window=observation.grown(attended.q, attended.lse, attended.scale, attended.softcap)
            )
        votes = entries.score("vote").clone()
        votes[..., -window:] += attended.column_sums().mean(dim=2)[..., -window:]
        return entries.scored(vote=votes)

    def prompt_votes(self, entries: Entries) -> torch.Tensor:
        """The votes of the observed queries, pooled among evictable entries: [batch, kv_heads, cached].

        Votes for these queries' own tokens are not pooled.
        """
        observation: Observation = entries.carried["window"]
        assert observation.q is not None
        group = observation.q.shape[1] // entries.keys.shape[1]
        votes = observation.accumulated_attention(entries.keys) / group
        old, kernel = entries.num_entries - observation.q.shape[2], self.settings.kernel_size
        if old:
            votes[..., :old] = avg_pool1d(votes[..., :old], kernel, stride=1, padding=kernel // 2)
        return votes

    def end_of_prompt(self, entries: Entries) -> Entries:
        if "window" not in entries.carried:
            return entries
        return entries.scored(vote=self.prompt_votes(entries)).carrying(window=None)

    def evict(self, entries: Entries, budget: int) -> Entries:
        return entries.kept(best(entries.score("vote"), budget, last=self.settings.recent_tokens))


class SnapKV(WindowVote[SnapKVSettings]):
    """The same budget in every layer."""
