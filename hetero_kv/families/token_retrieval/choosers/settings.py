"""Settings that all choosers have; each chooser's dataclass inherits from one of these."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hetero_kv.families.retrieval.paged_settings import PagedSettings
from hetero_kv.families.sparse_prefill.settings import PrefillSettings
from hetero_kv.settings.setting import SettingError, setting


def _choosers() -> Iterable[str]:
    from hetero_kv.families.token_retrieval.choosers import names

    return names()


def _storage_types() -> Iterable[str]:
    from hetero_kv.store import storage

    return storage.names()


def chooser_setting(name: str) -> Any:
    """The field `chooser` in the settings of the chooser called `name`."""
    return setting(name, "how a step chooses among the Context's tokens", choices=_choosers, names_method="{}")


@dataclass(frozen=True)
class TokenSettings(PagedSettings, PrefillSettings):
    """Initial | Context | Local; each kv head retrieves single tokens of the Context."""

    chooser: str = chooser_setting("sparq")
    block_size: int = setting(128, "tokens of a block, the unit in which they are stored", unit="tokens", minimum=1)
    sink_tokens: int = setting(
        128,
        "attention sink: the first tokens (in whole blocks), always attended",
        unit="tokens",
        minimum=0,
        formerly=("initial_len",),
    )
    local_windows_len: int = setting(128, "window of the newest tokens, always attended", unit="tokens", minimum=1)
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

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        self.require_whole_groups()


@dataclass(frozen=True)
class BudgetedSettings(TokenSettings):
    """Settings of choosers that take a fixed budget of tokens."""

    token_budget: int | float = setting(
        1024,
        "Context tokens that each kv head attends to: a whole number is tokens, a number up to 1.0 the share of the "
        "Context",
        minimum=0,
    )

    def budget(self, tokens: int) -> int:
        """Number of Context tokens that are attended to, of `tokens`."""
        budget = math.ceil(self.token_budget * tokens) if isinstance(self.token_budget, float) else self.token_budget
        return min(budget, tokens)

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        require_share("token_budget", self.token_budget, "tokens")


def require_share(name: str, value: float, units: str) -> None:
    """Raise SettingError for a number that is neither whole nor a share in (0, 1]."""
    if isinstance(value, float) and not 0 < value <= 1:
        raise SettingError(name, value, f"as a share it must be above 0 and at most 1.0; {units} are a whole number")


def part_of(value: float, whole: int) -> int:
    """The number of `whole` that a count or share means, at least one."""
    return max(1, min(whole, math.ceil(value * whole) if isinstance(value, float) else int(value)))
