"""The settings of retrieval with grouped positions."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.families.retrieval.settings import RetrievalSettings, representative_registries
from hetero_kv.settings.declaration import OperatorDeclaration
from hetero_kv.settings.setting import SettingError, setting


@dataclass(frozen=True)
class SharedPositionSettings(RetrievalSettings):
    """Retrieval in which keys beyond a query's neighbours share positions."""

    @property
    def shared_positions(self) -> tuple[int, int]:
        """(tokens that share a position, keys of a query that keep their distance, itself included)."""
        raise NotImplementedError("settings of shared positions say which are shared")

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        if self.prefills_sparsely:
            raise SettingError("prefill", self.prefill, "grouped positions need their own attention; set dense")


@dataclass(frozen=True)
class SelfExtendSettings(SharedPositionSettings):
    """Retrieval, and positions beyond the neighbours that are shared by groups of tokens."""

    position_group: int = setting(8, "tokens that share a position beyond the neighbours", unit="tokens", minimum=1)
    neighbour_window: int = setting(
        1024,
        "keys of a query that keep their positions, itself included; Local is at least as long",
        unit="tokens",
        minimum=1,
    )

    @property
    def shared_positions(self) -> tuple[int, int]:
        return self.position_group, self.neighbour_window


SELF_EXTEND = OperatorDeclaration(
    "SelfExtendAttention",
    "hetero_kv.families.self_extend.attention",
    "retrieval with positions that groups of tokens share beyond a window: longer than the model was made for",
    SelfExtendSettings,
    registries=representative_registries,
)
