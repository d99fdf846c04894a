"""The settings of ShadowKV (arXiv:2410.21465)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hetero_kv.settings.setting import SettingError, Settings, setting


def _storage_types() -> Iterable[str]:
    from hetero_kv.store import storage

    return storage.names()


@dataclass(frozen=True)
class ShadowKVSettings(Settings):
    """ShadowKV: low-rank keys where the model computes, values in DRAM, of which chunks are retrieved."""

    rank: int = setting(
        160,
        "rank of the keys of all kv heads together, before rotation; at most kv heads times head dim",
        minimum=1,
        names_method="rank {}",
    )
    landmark_chunk_size: int = setting(
        8, "tokens that are chosen together, by the mean of their keys", unit="tokens", minimum=1
    )
    outlier_chunks: int = setting(
        48, "chunks that their mean stands for worst, kept exactly and always attended", unit="chunks", minimum=0
    )
    local_chunks: int = setting(4, "newest whole chunks, kept exactly and always attended", unit="chunks", minimum=1)
    sparse_budget: int | float | Literal["all"] = setting(
        0.0156,
        "attended at each step beside outliers and newest tokens: a whole number is tokens, a number up to 1.0 the "
        "share of the sequence; all: full attention",
        minimum=0,
    )
    project_generated: bool = setting(
        False, "ShadowKV+: generated tokens join the low-rank keys as they leave the newest chunks, not a turn later"
    )
    refactor_above: float = setting(
        0.1,
        "factor the keys anew when a turn's keys have more than this share of their energy outside of the subspace",
        minimum=0,
        maximum=1,
    )
    value_type: str = setting("FP16", "number format of the values in DRAM", choices=_storage_types)

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
                f"that is fewer tokens than one chunk of landmark_chunk_size {self.landmark_chunk_size}; give at least "
                f"{self.landmark_chunk_size} tokens, a share of the sequence (0.0156 is 1.56 %), or all",
            )
