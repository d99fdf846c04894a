"""The settings of the model's own sliding-window layers: none."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.settings.declaration import OperatorDeclaration
from hetero_kv.settings.setting import Settings


@dataclass(frozen=True)
class SlidingWindowSettings(Settings):
    """No settings: the window is the model's own."""


SLIDING_WINDOW = OperatorDeclaration(
    "SlidingWindowAttention",
    "hetero_kv.families.window.attention",
    "the model's own attention to a sliding window or a chunk, exact, with only these tokens kept",
    SlidingWindowSettings,
)
