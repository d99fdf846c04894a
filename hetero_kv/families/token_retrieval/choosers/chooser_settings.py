"""The choosers that ship: the settings of each, and the class that implements it."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.families.sparse_prefill.settings import PREFILLS
from hetero_kv.families.token_retrieval.choosers.registry import CHOOSERS, register
from hetero_kv.families.token_retrieval.choosers.settings import (
    BudgetedSettings,
    TokenSettings,
    chooser_setting,
    require_share,
)
from hetero_kv.settings.declaration import OperatorDeclaration, Pieces
from hetero_kv.settings.setting import SettingError, setting


@register(
    "infinigen",
    meaning="predicts scores from the input of the layer before, by a part of skewed queries and keys (InfiniGen)",
    implementation=f"{__package__}.infinigen.InfiniGen",
)
@dataclass(frozen=True)
class InfiniGenSettings(BudgetedSettings):
    """InfiniGen: chooses tokens from the previous layer's input, with a part of the query and key components."""

    chooser: str = chooser_setting("infinigen")
    alpha: float = setting(
        4.0, "a token is chosen if its predicted score is at most this far below the highest", minimum=0
    )
    token_budget: int | float = setting(
        0.2,
        "Context tokens that each kv head attends to at most: a whole number is tokens, a number up to 1.0 the share "
        "of the Context",
        minimum=0,
    )
    partial_components: int | float = setting(
        0.3,
        "skewed components of queries and keys that predict scores: a whole number, or a number up to 1.0 as the "
        "share of a key's dimension",
        minimum=0,
    )
    skew_queries: int = setting(
        128, "last queries of a prompt from which the skewing is made", unit="tokens", minimum=1
    )

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        require_share("partial_components", self.partial_components, "components")


@register(
    "loki", meaning="scores keys by their first principal components (Loki)", implementation=f"{__package__}.loki.Loki"
)
@dataclass(frozen=True)
class LokiSettings(BudgetedSettings):
    """Loki: scores keys by their first principal components."""

    chooser: str = chooser_setting("loki")
    token_budget: int | float = setting(
        0.25,
        "Context tokens that each kv head attends to: a whole number is tokens, a number up to 1.0 the share of the "
        "Context",
        minimum=0,
    )
    key_components: int | float = setting(
        0.25,
        "principal components by which all keys are scored: a whole number, or a number up to 1.0 as the share of a "
        "key's dimension",
        minimum=0,
    )

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        require_share("key_components", self.key_components, "components")


@register(
    "magicpig",
    meaning="samples tokens that share a hash code with the query in two tables, weighted by their chance (MagicPIG)",
    implementation=f"{__package__}.magicpig.MagicPIG",
)
@dataclass(frozen=True)
class MagicPIGSettings(TokenSettings):
    """MagicPIG: samples tokens by locality-sensitive hashing, weighted by the inverse of their probability."""

    chooser: str = chooser_setting("magicpig")
    hash_bits: int = setting(10, "bits of a hash table's codes (K)", minimum=1, maximum=16)
    hash_tables: int = setting(
        150, "hash tables (L); a token is sampled if it has the query's code in two or more", minimum=2, maximum=65535
    )
    seed: int = setting(0, "of the random hyperplanes that hash", minimum=0)


@register(
    "retroinfer",
    meaning="clusters keys, reads the best clusters whole and estimates the next by their means (RetroInfer)",
    implementation=f"{__package__}.retroinfer.RetroInfer",
)
@dataclass(frozen=True)
class RetroInferSettings(TokenSettings):
    """RetroInfer: attends to the tokens of the best key clusters, and to the next clusters by their means."""

    chooser: str = chooser_setting("retroinfer")
    cluster_tokens: int = setting(
        16, "tokens of a cluster, on average; block_size is a multiple of it", unit="tokens", minimum=1
    )
    segment_tokens: int = setting(8192, "consecutive tokens that are clustered together", unit="tokens", minimum=1)
    exact_clusters: int | float = setting(
        0.018,
        "clusters whose tokens a kv head attends to: a whole number, or a number up to 1.0 as the share of all",
        minimum=0,
    )
    estimated_clusters: int | float = setting(
        0.232, "clusters after these that are estimated by their mean key and their values' sum, likewise", minimum=0
    )

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        require_share("exact_clusters", self.exact_clusters, "clusters")
        if isinstance(self.estimated_clusters, float) and self.estimated_clusters > 1:
            raise SettingError("estimated_clusters", self.estimated_clusters, "as a share it must be at most 1.0")
        if self.block_size % self.cluster_tokens:
            raise SettingError(
                "cluster_tokens",
                self.cluster_tokens,
                f"clusters are stored with blocks, and block_size {self.block_size} is not a multiple of it; set a "
                "divisor",
            )


@register(
    "sparq",
    meaning="scores keys by the query's largest components; the mean value represents unattended tokens (SparQ)",
    implementation=f"{__package__}.sparq.SparQ",
)
@dataclass(frozen=True)
class SparQSettings(BudgetedSettings):
    """SparQ: the query's largest components score all keys; the mean value replaces the values that are not read."""

    chooser: str = chooser_setting("sparq")
    query_components: int | float = setting(
        0.25,
        "components of a query by which all keys are scored, its largest: a whole number, or a number up to 1.0 as the "
        "share of its dimension",
        minimum=0,
    )
    mean_value: bool = setting(
        True, "adds the Context's mean value for unattended tokens, weighted by their estimated share"
    )

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        require_share("query_components", self.query_components, "components")


def _registries() -> Pieces:
    return {"Ways to choose tokens of TokenRetrievalAttention (chooser)": CHOOSERS.meanings(), **PREFILLS}


TOKEN_RETRIEVAL = OperatorDeclaration(
    "TokenRetrievalAttention",
    "hetero_kv.families.token_retrieval.attention",
    "keeps everything in DRAM blocks, attends to single tokens that the query retrieves",
    TokenSettings,
    variants=CHOOSERS,
    registries=_registries,
)
