"""The settings of InfLLM's streaming prefill (arXiv:2402.04617)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hetero_kv.families.retrieval.settings import representative_registries
from hetero_kv.families.self_extend.settings import SharedPositionSettings
from hetero_kv.settings.declaration import OperatorDeclaration
from hetero_kv.settings.setting import SettingError, setting

# A group larger than any sequence, so that all keys beyond the window share one position.
_EVERY_TOKEN = 1 << 62
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("representative_type", "DYNAMIC", "blocks are represented by the keys that the window's queries score highest"),
    ("representative_reduce", "mean", "a block is scored by all of its representatives"),
    ("group_reduce", "mean", "a chunk scores blocks by the sum over its queries"),
    ("preselect_block", False, "every chunk retrieves from all blocks"),
)


@dataclass(frozen=True)
class InfLLMStreamSettings(SharedPositionSettings):
    """Retrieval by prompts and answers alike; the window of neighbours is Local."""

    representative_reduce: Literal["max", "mean"] = setting(
        "mean", "a block's score from those of its representatives: their mean, by which InfLLM's sum orders blocks"
    )
    stream_chunk: int = setting(
        512,
        "tokens of a prompt that retrieve blocks together; fewer where a chunk (chunk_size) ends before",
        unit="tokens",
        minimum=1,
    )

    @property
    def shared_positions(self) -> tuple[int, int]:
        return _EVERY_TOKEN, self.local_windows_len

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        for name, value, why in _FIXED:
            if getattr(self, name) != value:
                raise SettingError(name, getattr(self, name), f"{why} in its stream; set {value}")


INFLLM_STREAM = OperatorDeclaration(
    "InfLLMStreamAttention",
    "hetero_kv.families.infllm_stream.attention",
    "prompts and answers attend to a window and to the blocks that they retrieve, however long: InfLLM's stream",
    InfLLMStreamSettings,
    registries=representative_registries,
)
