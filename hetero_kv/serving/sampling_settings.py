"""The default sampling settings of the chat and of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero_kv.settings.setting import SettingError, Settings, setting


@dataclass(frozen=True)
class SamplingSettings(Settings):
    """How tokens are chosen."""

    temperature: float = setting(0.0, "0: always the likeliest token (greedy); larger: more random sampling", minimum=0)
    top_p: float = setting(
        1.0, "sample from the likeliest tokens that have this share of the probability", minimum=0, maximum=1
    )
    top_k: int = setting(0, "sample from this many of the likeliest tokens; 0: from all", minimum=0)
    min_p: float = setting(
        0.0, "sample from tokens with at least this share of the likeliest token's probability", minimum=0, maximum=1
    )
    repetition_penalty: float = setting(
        1.0, "more than 1: tokens of the context become less likely by this factor", minimum=0
    )
    presence_penalty: float = setting(
        0.0, "is subtracted from the logit of every token that is in the answer", minimum=-2, maximum=2
    )
    frequency_penalty: float = setting(
        0.0, "is subtracted once for every time that a token is in the answer", minimum=-2, maximum=2
    )
    thinking: Literal["default", "on", "off"] = setting(
        "default", "whether a reasoning model thinks before it answers, if its chat template has a switch"
    )

    def validate(self) -> None:
        """Refuse settings that leave no token to draw. Raises SettingError."""
        if self.top_p == 0:
            raise SettingError("top_p", self.top_p, "it must be more than 0; for greedy answers set temperature 0")
        if self.repetition_penalty == 0:
            raise SettingError("repetition_penalty", self.repetition_penalty, "it must be more than 0; 1 for none")

    @property
    def unused(self) -> list[str]:
        """Sampling settings that are set although temperature is 0, which draws nothing."""
        drawn = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return [] if self.temperature else [name for name, without in drawn.items() if getattr(self, name) != without]

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None leaves it to its template."""
        return None if self.thinking == "default" else self.thinking == "on"
