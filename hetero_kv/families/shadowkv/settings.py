"""The settings of ShadowKV (arXiv:2410.21465)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from hetero_kv.families.sparse_prefill.settings import PREFILLS, PrefillSettings
from hetero_kv.settings.declaration import OperatorDeclaration
from hetero_kv.settings.setting import SettingError, setting

if TYPE_CHECKING:
    from hetero_kv.store.storage import StorageType

#: The paper's rank, and the number of key channels of its models.
_RANK, _CHANNELS = 160, 1024
# Share of the keys' energy that `rank: auto` preserves with fewer channels.
_ENERGY = 0.99


def _storage_types() -> Iterable[str]:
    from hetero_kv.store import storage

    return storage.names()


@dataclass(frozen=True)
class ShadowKVSettings(PrefillSettings):
    """ShadowKV: low-rank keys on the compute device, values in DRAM, of which chunks are retrieved."""

    rank: int | Literal["auto"] = setting(
        "auto",
        "rank of the keys of all kv heads together, before rotation; at most kv heads times head dim; auto: the "
        "paper's 160 for 1,024 channels or more, else the rank that keeps 99 % of the keys' energy",
        minimum=1,
        names_method="rank {}",
    )
    landmark_chunk_size: int = setting(
        8, "tokens of a chunk, which is chosen as a whole by the mean of its keys", unit="tokens", minimum=1
    )
    outlier_chunks: int = setting(
        48, "chunks that their mean represents worst, kept exactly and always attended", unit="chunks", minimum=0
    )
    local_chunks: int = setting(4, "newest whole chunks, kept exactly and always attended", unit="chunks", minimum=1)
    sparse_budget: int | float | Literal["all"] = setting(
        0.0156,
        "attended at each step besides outliers and newest tokens: a whole number is tokens, a number up to 1.0 the "
        "share of the sequence; all: full attention",
        minimum=0,
    )
    project_generated: bool = setting(
        False, "ShadowKV+: generated tokens join the low-rank keys as they leave the newest chunks, not a turn later"
    )
    refactor_above: float = setting(
        0.1,
        "factor the keys again when a turn's keys have more than this share of their energy outside of the subspace",
        minimum=0,
        maximum=1,
    )
    kv_type: str = setting("FP16", "number format of the values, which are stored in DRAM", choices=_storage_types)
    value_type: Literal["kv_type"] | str = setting(
        "kv_type", "number format of the stored values, if it differs from kv_type", choices=_storage_types
    )

    @property
    def value_storage(self) -> StorageType:
        """The storage type of values in DRAM."""
        from hetero_kv.store import storage

        return storage.get(getattr(self, self.storage_setting))

    @property
    def storage_setting(self) -> str:
        """The name of the setting that determines the storage type of values."""
        return "kv_type" if self.value_type == "kv_type" else "value_type"

    @property
    def most_rank(self) -> int:
        """The rank; in `sized` settings the largest possible rank."""
        assert self.rank != "auto"
        return self.rank

    def sized(self, channels: int) -> ShadowKVSettings:
        """These settings for keys of `channels` channels (kv heads times head dim): `auto` becomes the largest rank."""
        if self.rank != "auto":
            return self
        return replace(self, rank=_RANK if channels >= _CHANNELS else channels)

    def energy(self, channels: int) -> float | None:
        """The share of the keys' energy that determines the rank, once there are keys; None if the rank is fixed."""
        return _ENERGY if self.rank == "auto" and channels < _CHANNELS else None

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        budget = self.sparse_budget
        if isinstance(budget, float) and not 0 < budget <= 1:
            raise SettingError(
                "sparse_budget",
                budget,
                "as a share of the sequence it must be above 0 and at most 1.0; tokens are a whole number",
            )
        if isinstance(budget, int) and budget < self.landmark_chunk_size:
            raise SettingError(
                "sparse_budget",
                budget,
                f"it is less than one chunk of landmark_chunk_size {self.landmark_chunk_size} tokens; set at least "
                f"{self.landmark_chunk_size} tokens, a share of the sequence (0.0156 is 1.56 %), or all",
            )


SHADOWKV = OperatorDeclaration(
    "ShadowKVAttention",
    "hetero_kv.families.shadowkv.attention",
    "keeps keys as low-rank factors where the model computes and values in DRAM, attends to chosen chunks",
    ShadowKVSettings,
    registries=lambda: PREFILLS,
)
