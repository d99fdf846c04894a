"""The settings of saved contexts: folder, size limit, and automatic prefix caching."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetero_kv.settings.setting import Settings, setting

#: Separates the protocol from the rest of an address.
_ADDRESS = "://"
#: The settings that a folder of this machine does not use.
ADDRESS_FLAGS = "context_local_gb", "context_wait_s"


@dataclass(frozen=True)
class ContextSettings(Settings):
    """Saved contexts."""

    context_folder: str = setting(
        "auto",
        "folder of saved contexts, or an address for fsspec that machines share: s3://BUCKET/PATH, gs://…, "
        "file:///MOUNTED/FOLDER; auto: contexts in HETERO_KV_HOME, or in ~/.cache/hetero_kv",
    )
    context_cache_gb: float | Literal["all"] = setting(
        "all", "GB that all contexts may take; the least recently used are removed first; all: no limit", minimum=0
    )
    context_local_gb: float | Literal["all"] = setting(
        20.0,
        "GB of this machine's disk that cache an address; the least recently used files are removed first; all: no "
        "limit",
        minimum=0,
    )
    context_wait_s: float = setting(
        10.0,
        "the longest wait for an address; a prompt whose stored prefix does not arrive in time is computed",
        unit="seconds",
        minimum=0.1,
    )


@dataclass(frozen=True)
class ContextCacheSettings(ContextSettings):
    """Saved contexts, and how prompts use them."""

    context_cache: Literal["off", "read", "on"] = setting(
        "off",
        "read: a conversation starts from the longest stored prefix of its first prompt; on: also store the context "
        "of every answer",
    )


def is_address(place: str | Path) -> bool:
    """Whether contexts lie at an address, and not in a folder."""
    return _ADDRESS in str(place)
