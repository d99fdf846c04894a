"""Settings that all eviction policies have; each policy's dataclass inherits from one of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hetero_kv.families.sparse_prefill.settings import PrefillSettings
from hetero_kv.settings.setting import SettingError, Settings, setting


def _policies() -> Iterable[str]:
    from hetero_kv.families.bounded.eviction import names

    return names()


def policy_setting(name: str) -> Any:
    """The field `policy` in the settings of the policy called `name`."""
    return setting(name, "which entries stay", choices=_policies, names_method="policy {}")


def sink_setting(tokens: int) -> Any:
    """The field `sink_tokens` in the settings of a policy that keeps `tokens` attention sinks by default."""
    return setting(tokens, "first tokens of the sequence, always kept", unit="tokens", minimum=0, formerly=("sinks",))


@dataclass(frozen=True)
class BoundedSettings(Settings):
    """A fixed number of entries per layer and kv head."""

    policy: str = policy_setting("streaming_llm")
    budget: int | float = setting(
        2048,
        "entries kept per kv head and layer: a whole number is entries, a number up to 1.0 the share of the sequence "
        "as the last prompt left it",
        minimum=0,
    )

    @property
    def min_budget(self) -> int:
        """The smallest budget that the policy supports, in entries."""
        return 1

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        if isinstance(self.budget, float):
            if not 0 < self.budget <= 1:
                raise SettingError(
                    "budget",
                    self.budget,
                    "as a share of the sequence it must be above 0 and at most 1.0; entries are a whole number",
                )
        elif self.budget < self.min_budget:
            raise SettingError(
                "budget",
                self.budget,
                f"policy {self.policy} with these settings needs at least {self.min_budget} entries; set at least "
                f"{self.min_budget}, or a share of the sequence (0.2 is 20 %)",
            )


@dataclass(frozen=True)
class StridedSettings(BoundedSettings):
    """A fixed number of entries; prompts pass all layers in strides."""

    stride: int = setting(
        1024, "tokens of a prompt that pass through all layers before entries are dropped", unit="tokens", minimum=1
    )


@dataclass(frozen=True)
class WholePromptSettings(BoundedSettings, PrefillSettings):
    """A fixed number of entries; prompts pass each layer as a whole, with optional sparse prefill."""
