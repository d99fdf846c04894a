"""The eviction policies that ship: the settings of each, and the class that implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero_kv.families.bounded.eviction.registry import POLICIES, register
from hetero_kv.families.bounded.eviction.settings import (
    BoundedSettings,
    StridedSettings,
    WholePromptSettings,
    policy_setting,
    sink_setting,
)
from hetero_kv.families.retrieval.settings import LONGEST_QUESTION
from hetero_kv.settings.declaration import OperatorDeclaration, Pieces
from hetero_kv.settings.setting import SettingError, setting

#: The catalysts of table 2: for any text (CaP-G), and for a known question (CaP-Q).
GENERAL = "Summarize the critical points highlighted in this section."
QUESTION_AWARE = (
    "Considering the following question, summarize the critical points highlighted in this section. "
    "Question: {question}"
)


@register(
    "bigbird",
    meaning="the first tokens, the newest, and random blocks per kv head: a control",
    implementation=f"{__package__}.bigbird.BigBird",
)
@dataclass(frozen=True)
class BigBirdSettings(StridedSettings):
    """BigBird: the first tokens, the newest, and random blocks, as a control."""

    policy: str = policy_setting("bigbird")
    block_size: int = setting(64, "tokens of a random block", unit="tokens", minimum=1)
    global_ratio: float = setting(0.25, "share of the budget for the sequence's first tokens", minimum=0, maximum=1)
    recent_ratio: float = setting(
        0.375, "share of the budget that the newest tokens have", minimum=0, maximum=1, formerly=("window_ratio",)
    )
    seed: int = setting(0, "of the draw", minimum=0)

    def validate(self) -> None:
        super().validate()
        if self.global_ratio + self.recent_ratio > 1:
            raise SettingError(
                "recent_ratio",
                self.recent_ratio,
                f"with global_ratio {self.global_ratio} it exceeds the budget; set at most {1 - self.global_ratio:g}",
            )


@register(
    "cam",
    meaning="as h2o; evicted values are added to the newest tokens' at random, in proportion to attention",
    implementation=f"{__package__}.cam.CaM",
)
@dataclass(frozen=True)
class CaMSettings(WholePromptSettings):
    """CaM: heavy hitters and the newest tokens, the values of the evicted merged into the newest."""

    policy: str = policy_setting("cam")
    recent_ratio: float = setting(
        0.5, "share of the budget for the newest tokens, which evicted values are added to", minimum=0, maximum=1
    )
    seed: int = setting(0, "of the random choice of the evicted values that are added", minimum=0)


@register(
    "cascade",
    meaning="attention sinks, and sub-caches of every 1st, 2nd, 4th, … token, the more attended; at positions 0, 1, …",
    implementation=f"{__package__}.cascade.Cascade",
)
@dataclass(frozen=True)
class CascadeSettings(StridedSettings):
    """Cascading KV cache: attention sinks, and sub-caches that reach back exponentially."""

    policy: str = policy_setting("cascade")
    stride: int = setting(
        4096, "tokens of a prompt that pass through all layers before entries are dropped", unit="tokens", minimum=1
    )
    sink_tokens: int = sink_setting(64)
    sub_caches: int = setting(
        4, "parts of the budget after the sinks; each accepts half of what the one before evicts", minimum=1
    )
    gamma: float = setting(0.9999, "decay of the moving average of attention, per token", minimum=0, maximum=1)

    @property
    def min_budget(self) -> int:
        return self.sink_tokens + self.sub_caches


@register(
    "d2o",
    meaning="the highest accumulated attention, sinks and the newest; evicted entries merge into similar kept ones",
    implementation=f"{__package__}.d2o.D2O",
)
@dataclass(frozen=True)
class D2OSettings(WholePromptSettings):
    """D2O: heavy hitters and the newest tokens, the evicted merged into them, more of them where attention is dense."""

    policy: str = policy_setting("d2o")
    sink_tokens: int = sink_setting(4)
    recent_ratio: float = setting(
        0.25, "share of the budget without the sinks for the newest tokens", minimum=0, maximum=1
    )
    threshold: float | Literal["ema"] = setting(
        "ema",
        "cosine similarity from which an evicted entry is merged into the most similar kept one; ema: the mean of "
        "the prompt's, then a moving average; above 1: never",
    )
    beta: float = setting(0.7, "weight of the newest similarity in the moving average", minimum=0, maximum=1)
    allocation: Literal["relative", "absolute", "uniform"] = setting(
        "relative",
        "how the budget is shared out to layers, in proportion to exp(-variance) of the attention that their entries "
        "received: relative scales variances to 0-1 over the layers; absolute uses them unscaled; uniform: equal "
        "budgets",
    )

    @property
    def min_budget(self) -> int:
        return self.sink_tokens + 1


@register(
    "h2o", meaning="the highest accumulated attention, and the newest tokens", implementation=f"{__package__}.h2o.H2O"
)
@dataclass(frozen=True)
class H2OSettings(WholePromptSettings):
    """H2O: heavy hitters and the newest tokens."""

    policy: str = policy_setting("h2o")
    recent_ratio: float = setting(0.5, "share of the budget for the newest tokens", minimum=0, maximum=1)


@register(
    "infinipot",
    meaning="a pot that is distilled when full: what a catalyst prompt attends to, and the most novel tokens",
    implementation=f"{__package__}.infinipot.InfiniPot",
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
    def min_budget(self) -> int:
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
    "snapkv",
    meaning="the entries that the prompt's last queries vote for, and these queries' tokens",
    implementation=f"{__package__}.snapkv.SnapKV",
)
@dataclass(frozen=True)
class SnapKVSettings(WholePromptSettings):
    """SnapKV: what the prompt's last queries attend to."""

    policy: str = policy_setting("snapkv")
    recent_tokens: int = setting(64, "newest entries, which are kept", unit="tokens", minimum=1, formerly=("window",))
    observation: int | Literal["question"] = setting(
        "question",
        "last queries of the prompt, which vote; question: the turn's question, or as many as `recent_tokens` if "
        "its beginning is unknown",
        unit="tokens",
        minimum=1,
    )
    kernel_size: int = setting(
        5,
        "average pooling of the votes along entries, odd; 1: none",
        unit="entries",
        minimum=1,
        formerly=("kernel",),
    )

    def observed(self, question: int | None) -> int:
        """Number of a prompt's last queries that vote; `question` as in `ObservedAttention`."""
        if self.observation != "question":
            return self.observation
        return self.recent_tokens if question is None else min(question, LONGEST_QUESTION)

    @property
    def min_budget(self) -> int:
        return self.recent_tokens + 1

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        if self.kernel_size % 2 == 0:
            raise SettingError("kernel_size", self.kernel_size, "it must be odd, so that pooling has a middle")


@register(
    "pyramidkv",
    meaning="SnapKV's vote, with budgets that fall linearly from the bottom layer",
    implementation=f"{__package__}.pyramidkv.PyramidKV",
)
@dataclass(frozen=True)
class PyramidKVSettings(SnapKVSettings):
    """PyramidKV: what the prompt's last queries attend to, more of it in lower layers."""

    policy: str = policy_setting("pyramidkv")
    beta: float = setting(
        20.0, "steepness: the top layer has 1/beta of the mean budget, without the window; 1: equal budgets", minimum=1
    )


@register(
    "random",
    meaning="a uniformly random choice per kv head: the control",
    implementation=f"{__package__}.random.RandomChoice",
)
@dataclass(frozen=True)
class RandomSettings(StridedSettings):
    """Random entries, as a control."""

    policy: str = policy_setting("random")
    prefill: Literal["full", "strided"] = setting(
        "full", "full attention over the prompt before entries are drawn, or in strides"
    )
    seed: int = setting(0, "of the draw", minimum=0)


@register(
    "roco",
    meaning="the highest mean attention, and the most unevenly attended entries",
    implementation=f"{__package__}.roco.RoCo",
)
@dataclass(frozen=True)
class RoCoSettings(WholePromptSettings):
    """RoCo: mean attention, unevenly attended entries protected."""

    policy: str = policy_setting("roco")
    protected_ratio: float = setting(
        0.3, "share of the budget for the entries whose attention deviates most", minimum=0, maximum=1
    )
    recent_tokens: int = setting(
        10, "newest entries, which count as deviating most", unit="entries", minimum=0, formerly=("recent",)
    )

    @property
    def min_budget(self) -> int:
        return self.recent_tokens + 1


@register(
    "sirllm",
    meaning="attention sinks, the tokens that the model expected least, and the newest; at positions 0, 1, …",
    implementation=f"{__package__}.sirllm.SirLLM",
)
@dataclass(frozen=True)
class SirLLMSettings(StridedSettings):
    """SirLLM: attention sinks, the least expected tokens and the newest."""

    policy: str = policy_setting("sirllm")
    sink_tokens: int = sink_setting(4)
    recent_ratio: float = setting(0.25, "share of the budget for the newest tokens", minimum=0, maximum=1)
    decay_ratio: float = setting(
        1.0, "factor of the entropy of earlier tokens at every new turn; 1: memory does not fade", minimum=0, maximum=1
    )

    @property
    def min_budget(self) -> int:
        return self.sink_tokens + 1


@register(
    "streaming_llm",
    meaning="attention sinks and the newest tokens, at positions 0, 1, …",
    implementation=f"{__package__}.streaming_llm.StreamingLLM",
)
@dataclass(frozen=True)
class StreamingLLMSettings(StridedSettings):
    """StreamingLLM: the first tokens and the newest."""

    policy: str = policy_setting("streaming_llm")
    sink_tokens: int = sink_setting(4)

    @property
    def min_budget(self) -> int:
        return self.sink_tokens + 1


@register(
    "tova",
    meaning="the entries that the last query attends to most, one set for all heads",
    implementation=f"{__package__}.tova.Tova",
)
@dataclass(frozen=True)
class TovaSettings(StridedSettings):
    """TOVA: what the last query attends to."""

    policy: str = policy_setting("tova")


def _registries() -> Pieces:
    return {"Eviction policies of BoundedAttention (policy)": POLICIES.meanings()}


BOUNDED = OperatorDeclaration(
    "BoundedAttention",
    "hetero_kv.families.bounded.attention",
    "keeps a fixed number of entries per kv head, chosen by an eviction policy",
    BoundedSettings,
    variants=POLICIES,
    registries=_registries,
)
