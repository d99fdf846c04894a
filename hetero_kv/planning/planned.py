"""The interface of an injected model to the memory plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.settings.engine_settings import EngineSettings


class Planned(Protocol):
    """A model, loaded or on the meta device, with the operators that rules have injected."""

    @property
    def model(self) -> Any:
        """The transformers model."""

    @property
    def engine(self) -> EngineSettings:
        """The engine's settings in force."""

    @property
    def context_length(self) -> int:
        """The length that the model was trained for, tokens."""

    @property
    def sparse_drafts(self) -> bool:
        """Whether its tokens are guessed by attention to few blocks (`speculation: sparse`)."""

    def attention_operators(self) -> Iterator[AttentionOperator]:
        """The operators that compute attention, in the model's order."""
