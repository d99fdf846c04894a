"""The settings of retrieval attention; their names follow KTransformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hetero_kv.families.retrieval.budgets import Pyramid
from hetero_kv.families.retrieval.paged_settings import PagedSettings
from hetero_kv.families.sparse_prefill.settings import PREFILLS, PrefillSettings
from hetero_kv.settings.declaration import OperatorDeclaration, Pieces
from hetero_kv.settings.setting import SettingError, setting

if TYPE_CHECKING:
    from hetero_kv.store.storage import StorageType

#: The longest observation window of a question: its cost grows with its length times the context's.
LONGEST_QUESTION = 1024
#: The observation window if the caller does not say where the question begins.
UNKNOWN_QUESTION = 128


def _representative_types() -> Iterable[str]:
    from hetero_kv.families.retrieval import representatives

    return representatives.names()


def _storage_types() -> Iterable[str]:
    from hetero_kv.store import storage

    return storage.names()


def _representative_storages() -> Iterable[str]:
    from hetero_kv.store import storage

    return [name for name in storage.names() if not storage.get(name).is_coarse]


@dataclass(frozen=True)
class RetrievalSettings(PagedSettings, PrefillSettings):
    """KTransformers' CPU sparse attention: Initial | Context | Local, of which Context is retrieved by blocks."""

    block_size: int = setting(128, "tokens of a Context block", unit="tokens", minimum=1, maximum=1 << 16)
    sink_tokens: int = setting(
        128,
        "attention sink: the first tokens (in whole blocks), always attended",
        unit="tokens",
        minimum=0,
        formerly=("initial_len",),
    )
    local_windows_len: int = setting(4096, "window of the newest tokens, always attended", unit="tokens", minimum=1)
    top_k_blocks: int | Literal["all"] | tuple[int, ...] | Pyramid = setting(
        96,
        "Context blocks attended at each step, or as many tokens (attend_to); all: full attention",
        unit="blocks",
        minimum=0,
        aliases=("second_select_num",),
        formerly=("second_block_count",),
    )
    preselect_block: bool = setting(
        False, "restrict the candidates once per turn to the blocks that the prompt's last queries attend to"
    )
    preselect_block_count: int | tuple[int, ...] | Pyramid = setting(
        96,
        "blocks that preselection keeps; if top_k_blocks is at least as large, all of them are attended to",
        unit="blocks",
        minimum=0,
    )
    kernel_size: int = setting(
        5, "average pooling of preselection's votes along tokens, odd; 1: none", unit="tokens", minimum=1
    )
    observation: int | Literal["question"] = setting(
        "question",
        "last queries of the prompt whose attention DYNAMIC and preselection read; question: the turn's question, or "
        "128 if its beginning is unknown",
        unit="tokens",
        minimum=1,
        aliases=("observation_len",),
    )
    representative_type: str = setting(
        "DYNAMIC",
        "the vectors that represent a block when blocks are scored",
        choices=_representative_types,
        aliases=("anchor_type",),
        value_aliases={"BLOCK_MEAN": "MEAN", "BLOCK_MAX": "MAX", "FIXED_ANCHOR": "FIXED"},
        names_method="{}",
    )
    representative_num: int = setting(
        1, "representatives of a block", minimum=1, aliases=("anchor_num",), names_method="{} per block"
    )
    representative_reduce: Literal["max", "mean"] = setting(
        "max",
        "a block's score from those of its representatives: the maximum, or the mean, which orders blocks as "
        "InfLLM's sum does; then only their mean is stored",
    )
    representative_storage: Literal["auto"] | str = setting(
        "auto",
        "number format of the representatives and of mean values; auto: that of the keys, or FP16 if that has fewer "
        "bits or if Q8_0's groups of 32 do not divide the head dimension",
        choices=_representative_storages,
    )
    head_select_mode: Literal["SHARED", "SEPARATE"] = setting(
        "SHARED",
        "SHARED: one choice of blocks for all kv heads; SEPARATE: one per kv head",
        names_method="{}",
    )
    group_reduce: Literal["mean", "max", "softmax", "softmax_max"] = setting(
        "mean",
        "a kv head's score of a block from those of its group's query heads: their mean or maximum; softmax, "
        "softmax_max: mean or maximum of each head's softmax over the blocks",
    )
    residual_attention: Literal["drop", "estimate"] = setting(
        "drop",
        "Context blocks that are not attended to; estimate: each counts as one token of its mean key and mean value, "
        "with the weight of all its tokens",
        formerly=("rest",),
    )
    rerank: int | Literal["all"] = setting(
        1,
        "representatives propose this many times the attended blocks, and coarse scores of keys choose among these; "
        "1: the representatives choose; all: every block's keys are scored",
        minimum=1,
    )
    attend_to: Literal["blocks", "tokens"] = setting(
        "blocks",
        "the unit of attention in the Context; blocks: whole blocks; tokens: as many single tokens, those with most "
        "attention in the blocks that rerank scores; a block's other tokens count as unattended",
    )
    target_mass: float | Literal["none"] = setting(
        "none",
        "share of the attention, above 0, that the fewest possible blocks or tokens reach by estimate, in each list "
        "of blocks; top_k_blocks is the maximum then",
        minimum=0,
        maximum=1,
    )
    min_blocks: int = setting(
        1,
        "with target_mass, the least number of attended Context blocks; at most top_k_blocks",
        unit="blocks",
        minimum=0,
        formerly=("least_block_count",),
    )
    max_dense_blocks: int = setting(
        0,
        "with target_mass, number of Context blocks up to which all are attended to: exact, and faster than a choice "
        "among few",
        unit="blocks",
        minimum=0,
        formerly=("whole_block_count",),
    )
    group_blocks: int = setting(
        1,
        "blocks of a group; groups are scored first, and only blocks of the best groups are scored; 1: all blocks "
        "are scored",
        unit="blocks",
        minimum=1,
    )
    group_factor: int = setting(
        4,
        "times top_k_blocks blocks that groups are opened with, where blocks have groups; where single tokens "
        "are chosen (attend_to), times the blocks that these are taken from",
        minimum=1,
    )
    layer_step: int = setting(1, "reselect in every n-th layer, reuse its blocks between", unit="layers", minimum=1)
    token_step: int = setting(
        1, "reselect at every n-th generated token, reuse the blocks between", unit="tokens", minimum=1
    )
    dense_layer_num: int = setting(0, "first layers that attend to everything", unit="layers", minimum=0)
    kv_type: str = setting("FP16", "number format of the stored keys and values", choices=_storage_types)
    key_type: Literal["kv_type"] | str = setting(
        "kv_type", "number format of the stored keys, if it differs from kv_type", choices=_storage_types
    )
    value_type: Literal["kv_type"] | str = setting(
        "kv_type", "number format of the stored values, if it differs from kv_type", choices=_storage_types
    )
    key_offset: Literal["auto", "none", "block_mean"] = setting(
        "auto",
        "block_mean: keys are stored as differences to their block's mean, which few bits represent better; scores "
        "include the mean again; auto: for keys in Q4_0",
    )

    @property
    def stored_representatives(self) -> int:
        """Representatives stored per block and kv head."""
        return 1 if self.representative_reduce == "mean" else self.representative_num

    def representative_kind(self, *dims: int) -> StorageType:
        """Storage type of representatives and mean values of these dimensions; FP16 if the setting's does not fit."""
        from hetero_kv.store import storage

        name = self.representative_storage
        kind = self.key_storage.for_representatives if name == "auto" else storage.get(name)
        return kind if all(map(kind.takes, dims)) else storage.get("FP16")

    def observed(self, question: int | None) -> int:
        """The length of the observation window, if the question has the last `question` tokens of the prompt.

        None means that the caller does not say where the question begins.
        """
        if self.observation != "question":
            return self.observation
        return UNKNOWN_QUESTION if question is None else min(question, LONGEST_QUESTION)

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        from hetero_kv.families.retrieval import representatives

        least, most = representatives.get(self.representative_type).counts
        if self.representative_num < least or (most is not None and self.representative_num > most):
            allowed = f"{least} or more" if most is None else f"{least}" if least == most else f"{least} to {most}"
            raise SettingError(
                "representative_num",
                self.representative_num,
                f"representative_type {self.representative_type} takes {allowed}",
            )
        self._require_mean()
        if self.attend_to == "tokens" and self.rerank == 1:
            raise SettingError(
                "attend_to",
                self.attend_to,
                "single tokens are chosen by scores of their keys, which rerank 1 does not compute; set rerank to "
                "all or to 2 or more, or attend_to to blocks",
            )
        self._require_reachable_target()
        self._require_groups()
        if self.representative_num > self.block_size and most is None:
            raise SettingError(
                "representative_num",
                self.representative_num,
                f"it exceeds the {self.block_size} keys of a block (block_size); set a smaller number, or larger "
                "blocks",
            )
        if self.representative_reduce == "mean" and representatives.get(self.representative_type).score != "dot":
            raise SettingError(
                "representative_reduce",
                self.representative_reduce,
                f"representative_type {self.representative_type} does not consist of keys, which a query is "
                "multiplied with; set max, or representative_type DYNAMIC or FIXED",
            )
        if self.kernel_size % 2 == 0:
            raise SettingError("kernel_size", self.kernel_size, "it must be odd, so that pooling has a middle")
        self.require_whole_groups()

    def _require_reachable_target(self) -> None:
        """Raise SettingError for a target mass of 0, or block counts that contradict each other."""
        if self.target_mass == 0:
            raise SettingError(
                "target_mass",
                self.target_mass,
                "a share of 0 has no effect; set a share above 0, such as 0.9, or none for top_k_blocks blocks",
            )
        most = self.top_k_blocks
        if self.target_mass != "none" and isinstance(most, int) and self.min_blocks > most:
            raise SettingError(
                "min_blocks",
                self.min_blocks,
                f"with target_mass top_k_blocks, which is {most}, limits the attended blocks; set {most} or "
                "fewer, or a larger top_k_blocks",
            )

    def _require_groups(self) -> None:
        """Raise SettingError for groups of blocks under a type whose representatives cannot be combined."""
        from hetero_kv.families.retrieval import representatives

        if self.group_blocks == 1 or representatives.get(self.representative_type).combined is not None:
            return
        known = ", ".join(name for name in representatives.names() if representatives.get(name).combined is not None)
        raise SettingError(
            "group_blocks",
            self.group_blocks,
            f"representatives of representative_type {self.representative_type} cannot be combined to those of a "
            f"group of blocks; use one of {known}, or set group_blocks to 1",
        )

    def _require_mean(self) -> None:
        """Raise SettingError for settings that estimate a block's attention, under a type without a mean key."""
        from hetero_kv.families.retrieval import representatives

        if representatives.get(self.representative_type).has_mean:
            return
        known = " or ".join(name for name in representatives.names() if representatives.get(name).has_mean)
        for key, neutral in (("residual_attention", "drop"), ("rerank", 1), ("target_mass", "none")):
            if getattr(self, key) != neutral:
                raise SettingError(
                    key,
                    getattr(self, key),
                    f"representative_type {self.representative_type} has no mean to estimate a block by; use {known}, "
                    f"or set {key} to {neutral}",
                )


def representative_registries() -> Pieces:
    """What the settings of retrieval can name: types of representatives and kinds of prefill."""
    from hetero_kv.families.retrieval import representatives

    known = {name: representatives.get(name).meaning for name in representatives.names()}
    return {"Representatives of a block (representative_type)": known, **PREFILLS}


RETRIEVAL = OperatorDeclaration(
    "RetrievalAttention",
    "hetero_kv.families.retrieval.attention",
    "keeps everything in DRAM blocks, attends to the blocks that the query retrieves",
    RetrievalSettings,
    registries=representative_registries,
)
