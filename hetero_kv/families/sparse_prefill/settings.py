"""Settings of sparse prefill, which operators with chunked prefill have in addition to their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetero_kv.settings.description import setting_names
from hetero_kv.settings.setting import Settings, setting

#: The kinds of prefill attention and their descriptions, under the title of their list.
PREFILLS: Mapping[str, Mapping[str, str]] = {
    "Attention of prompts (prefill)": {
        "dense": "to everything before",
        "minference": "each head by its own pattern, A-shape, vertical-slash or block-sparse, found once for a model",
        "flexprefill": "the fewest keys that by estimate receive a share of the attention, chosen again in every chunk",
    }
}


def _prefills() -> tuple[str, ...]:
    return tuple(name for known in PREFILLS.values() for name in known)


@dataclass(frozen=True)
class PrefillSettings(Settings):
    """The keys that the queries of a prompt attend to."""

    prefill: str = setting("dense", "attention of prompts", choices=_prefills)
    prefill_from: int = setting(
        2048,
        "tokens of a context up to which queries of a sparse prefill attend to everything",
        unit="tokens",
        minimum=64,
    )
    prefill_last: int = setting(
        256,
        "with a sparse prefill, last tokens of a prompt whose queries attend to everything",
        unit="tokens",
        minimum=0,
    )
    prefill_budget: int = setting(
        8192,
        "with minference, the most tokens of a head's pattern; a block of 64 queries also attends to the sink and to "
        "itself",
        unit="tokens",
        minimum=128,
    )
    error_budget: float = setting(
        0.02,
        "with minference, error of a head's output, squared and relative to its layer's heads, that 1,024 tokens fewer "
        "may cost, in contexts of more than 16,384 tokens less; 0: the nearest pattern",
        minimum=0,
        maximum=1,
        formerly=("prefill_price",),
    )
    prefill_matches: int = setting(
        2,
        "with minference, blocks of 64 keys that a block of 64 queries attends to besides, those that a few of the "
        "queries match best, in contexts of more than 16,384 tokens",
        unit="blocks",
        minimum=0,
        maximum=1024,
    )
    prefill_mass: float = setting(0.95, "with flexprefill, share of the attention to reach", minimum=0, maximum=1)
    prefill_min_budget: int = setting(
        512,
        "with flexprefill, the fewest tokens of a head",
        unit="tokens",
        minimum=64,
        formerly=("prefill_least",),
    )

    @property
    def prefills_sparsely(self) -> bool:
        """Whether a prompt's queries skip keys."""
        return self.prefill != "dense"

    @property
    def idle_prefill_settings(self) -> frozenset[str]:
        """The settings of this class that do not affect what is stored."""
        return frozenset() if self.prefills_sparsely else frozenset(setting_names(PrefillSettings))
