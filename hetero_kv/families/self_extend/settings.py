"""The settings of retrieval with grouped positions."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.settings.setting import SettingError, setting


@dataclass(frozen=True)
class SelfExtendSettings(RetrievalSettings):
    """Retrieval, and positions beyond the neighbours that are shared by groups of tokens."""

    position_group: int = setting(8, "tokens that share a position beyond the neighbours", unit="tokens", minimum=1)
    neighbour_window: int = setting(
        1024,
        "keys of a query that keep their positions, itself included; Local is at least as long",
        unit="tokens",
        minimum=1,
    )

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        if self.prefills_sparsely:
            raise SettingError("prefill", self.prefill, "grouped positions prefill with everything; take dense")
