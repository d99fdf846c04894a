"""The settings of the engine and of its operators, each a dataclass field; their names follow KTransformers.

Precedence, highest first: command line, rules file, settings file, the defaults below (see `merge`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from hetero_kv.errors import ConfigError
from hetero_kv.selection.budgets import Pyramid
from hetero_kv.setting import (
    SettingError,
    SettingRow,
    Settings,
    canonical,
    describe,
    nearest_spelling,
    setting,
    settings_from_mapping,
)

__all__ = [
    "ALL_LONG_CONTEXT",
    "ConfigError",
    "EngineSettings",
    "RetrievalSettings",
    "SettingError",
    "SettingRow",
    "Settings",
    "ShadowKVSettings",
    "SlidingWindowSettings",
    "canonical",
    "describe",
    "merge",
    "nearest_spelling",
    "setting",
    "settings_from_mapping",
    "split_long_context",
]


def _representative_types() -> Iterable[str]:
    from hetero_kv.selection import representatives

    return representatives.names()


def _storage_types() -> Iterable[str]:
    from hetero_kv.kv import storage

    return storage.names()


@dataclass(frozen=True)
class EngineSettings(Settings):
    """What the engine is given, whatever the operators are."""

    chunk_size: int = setting(4096, "prefill chunk", unit="tokens", minimum=1)
    max_seq_len: int | Literal["auto"] = setting(
        "auto", "capacity of the KV store; auto: from the DRAM that is free", unit="tokens", minimum=1
    )
    threads_num: int | Literal["auto"] = setting(
        "auto",
        "CPU threads, as far as the process has CPUs; auto: the physical cores",
        minimum=1,
        aliases=("cpu_infer",),
    )

    measure_recall: bool = setting(
        False, "measure the share of the full attention mass that the attended blocks cover (slow)"
    )

    def resolved_threads(self) -> int:
        """CPU threads to start: `threads_num` or the physical cores, at most the CPUs of the process's affinity."""
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # Virtual machines and some ARM systems do not tell their physical cores.
        wanted = (psutil.cpu_count(logical=False) or usable) if self.threads_num == "auto" else self.threads_num
        return min(wanted, usable)


@dataclass(frozen=True)
class RetrievalSettings(Settings):
    """KTransformers' CPU sparse attention: Initial | Context | Local, of which Context is retrieved by blocks."""

    block_size: int = setting(128, "tokens of a Context block", unit="tokens", minimum=1)
    initial_len: int = setting(
        128, "attention sink: the first tokens (in whole blocks), always attended", unit="tokens", minimum=0
    )
    local_windows_len: int = setting(4096, "window of the newest tokens, always attended", unit="tokens", minimum=1)
    second_block_count: int | Literal["all"] | tuple[int, ...] | Pyramid = setting(
        96,
        "Context blocks attended at each step; all: full attention",
        unit="blocks",
        minimum=0,
        aliases=("second_select_num",),
    )
    preselect_block: bool = setting(
        False, "restrict the candidates once per turn, by what the end of the prompt attends to"
    )
    preselect_block_count: int | tuple[int, ...] | Pyramid = setting(
        96,
        "blocks that survive preselection; where second_block_count is no less, all of them are attended to",
        unit="blocks",
        minimum=0,
    )
    kernel_size: int = setting(
        5, "average pooling of preselection's votes along tokens, odd; 1: none", unit="tokens", minimum=1
    )
    observation_len: int = setting(
        128, "last queries of the prompt whose attention DYNAMIC and preselection read", unit="tokens", minimum=1
    )
    representative_type: str = setting(
        "DYNAMIC",
        "what stands for a block when blocks are scored",
        choices=_representative_types,
        aliases=("anchor_type",),
        value_aliases={"BLOCK_MEAN": "MEAN", "BLOCK_MAX": "MAX", "FIXED_ANCHOR": "FIXED"},
    )
    representative_num: int = setting(1, "representatives of a block", minimum=1, aliases=("anchor_num",))
    head_select_mode: Literal["SHARED", "SEPARATE"] = setting(
        "SHARED", "SHARED: one choice of blocks for all kv heads; SEPARATE: each kv head its own"
    )
    group_reduce: Literal["mean", "max"] = setting(
        "mean", "a kv head's score of a block from those of its group's query heads"
    )
    layer_step: int = setting(1, "reselect in every n-th layer, reuse its blocks between", unit="layers", minimum=1)
    token_step: int = setting(
        1, "reselect at every n-th generated token, reuse the blocks between", unit="tokens", minimum=1
    )
    dense_layer_num: int = setting(0, "first layers that attend to everything", unit="layers", minimum=0)
    kv_type: str = setting("FP16", "number format of the stored keys and values", choices=_storage_types)

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        from hetero_kv.kv import storage
        from hetero_kv.selection import representatives

        least, most = representatives.get(self.representative_type).counts
        if self.representative_num < least or (most is not None and self.representative_num > most):
            allowed = f"{least} or more" if most is None else f"{least}" if least == most else f"{least} to {most}"
            raise SettingError(
                "representative_num",
                self.representative_num,
                f"representative_type {self.representative_type} takes {allowed}",
            )
        if self.representative_num > self.block_size and most is None:
            raise SettingError(
                "representative_num",
                self.representative_num,
                f"a block of block_size {self.block_size} has no more keys than that; take fewer, or larger blocks",
            )
        if self.kernel_size % 2 == 0:
            raise SettingError("kernel_size", self.kernel_size, "it must be odd, so that pooling has a middle")
        multiple = storage.get(self.kv_type).block_multiple
        if self.block_size % multiple:
            raise SettingError(
                "block_size",
                self.block_size,
                f"kv_type {self.kv_type} needs a multiple of {multiple}, such as "
                f"{-(-self.block_size // multiple) * multiple}; or take kv_type FP16",
            )


@dataclass(frozen=True)
class ShadowKVSettings(Settings):
    """ShadowKV: low-rank keys where the model computes, values in DRAM, of which chunks are retrieved."""

    rank: int = setting(
        160, "rank of the keys of all kv heads together, before rotation; at most kv heads times head dim", minimum=1
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


@dataclass(frozen=True)
class SlidingWindowSettings(Settings):
    """No settings: the window is the model's own."""


ALL_LONG_CONTEXT: tuple[type[Settings], ...] = (EngineSettings, RetrievalSettings)
"""The classes whose fields the flat `long_context:` block of rules files and of the settings file may hold."""


def split_long_context(mapping: Mapping[Any, Any] | None, *, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A `long_context:` block as overrides of EngineSettings and of RetrievalSettings, under the fields' own names.

    Raises:
        ConfigError: what `canonical` refuses, calling the place `where`.
    """
    overrides = canonical(ALL_LONG_CONTEXT, mapping, where=where)
    engine, retrieval = ({row.name for row in describe(cls)} for cls in ALL_LONG_CONTEXT)
    return (
        {name: value for name, value in overrides.items() if name in engine},
        {name: value for name, value in overrides.items() if name in retrieval},
    )


def merge(
    *,
    command_line: Mapping[str, Any] | None = None,
    rules_file: Mapping[str, Any] | None = None,
    settings_file: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The overrides in force, by precedence; each mapping holds settings under their own names (see `canonical`)."""
    return {**(settings_file or {}), **(rules_file or {}), **(command_line or {})}
