"""InfiniPot (Kim et al. 2024, arXiv:2410.01518): a pot that is distilled whenever it is full."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.ranking import best
from hetero_kv.families.bounded.eviction.registry import register
from hetero_kv.families.bounded.eviction.settings import BoundedSettings, policy_setting
from hetero_kv.settings.setting import SettingError, setting

#: The catalysts of table 2: for any text (CaP-G), and for a known question (CaP-Q).
GENERAL = "Summarize the critical points highlighted in this section."
QUESTION_AWARE = (
    "Considering the following question, summarize the critical points highlighted in this section. "
    "Question: {question}"
)


@dataclass(frozen=True)
class InfiniPotSettings(BoundedSettings):
    """InfiniPot: a pot of `budget` entries, distilled when it is full."""

    policy: str = policy_setting("infinipot")
    kept_ratio: float = setting(0.5, "share of a full pot that is kept; above 0 and below 1", minimum=0, maximum=1)
    nuc_ratio: float = setting(0.5, "share of the kept entries for the most novel tokens", minimum=0, maximum=1)
    catalyst: str = setting(
        GENERAL,
        "text whose tokens' attention chooses the entries that represent the pot; {question} is replaced by `question`",
    )
    question: str = setting(
        "", "the question about the context, if it is known; with the default catalyst, the paper's CaP-Q"
    )

    @property
    def least(self) -> int:
        """At least one entry stays, and one more fits; see BoundedSettings."""
        return 2

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        if not 0 < self.kept_ratio < 1:
            raise SettingError(
                "kept_ratio", self.kept_ratio, "it must be above 0 and below 1, so that a full pot gets room (0.5)"
            )
        if not self.catalyst.strip():
            raise SettingError("catalyst", self.catalyst, f"it must contain text, such as {GENERAL!r}")
        has_place = "{question}" in self.catalyst
        if has_place and not self.question:
            raise SettingError("question", self.question, "the catalyst has a place for it, {question}; give one")
        if self.question and not has_place and self.catalyst != GENERAL:
            raise SettingError(
                "catalyst", self.catalyst, "it has no place for the question; write {question} where it is to stand"
            )

    @property
    def catalyst_text(self) -> str:
        """The catalyst with the question inserted."""
        catalyst = QUESTION_AWARE if self.question and self.catalyst == GENERAL else self.catalyst
        return catalyst.replace("{question}", self.question)


@register(
    "infinipot",
    meaning="a pot that is distilled when full: what a catalyst prompt attends to, and the most novel tokens",
    settings=InfiniPotSettings,
)
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
