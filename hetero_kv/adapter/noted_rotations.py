"""Attention operators that need to know how every token was rotated: they take note of it before each forward."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from hetero_kv.adapter import bridge
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.rotary_probe import of_rows, position_embeddings, rotation_of
from hetero_kv.adapter.rotation import Rotation
from hetero_kv.engine.step import Step
from hetero_kv.settings.engine_settings import EngineSettings


class NotedRotations(AttentionOperator):
    """An operator that is told of the rotations of new tokens (`_record`) before it sees their keys.

    Attributes:
        rotation: how the wrapped module rotates; None before it has been seen.
    """

    changes_arguments = True
    #: What it is that rotations are needed for, and the remedy where there are none.
    rotation_use: ClassVar[str]

    def __init__(self, path: str, wrapped: Any, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.rotation: Rotation | None = None

    def arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Takes note of how the tokens' positions are rotated."""
        cos, sin = position_embeddings(self.path, self.wrapped, kwargs, self.rotation_use)
        if self.rotation is None:
            self.rotation = rotation_of(self.path, self.wrapped, args, kwargs, self.rotation_use)
        for step in bridge.cache_in(args, kwargs, self.path).steps:
            self._record(step, self.rotation, of_rows(cos, step.rows), of_rows(sin, step.rows))
        return kwargs

    def lasting_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs

    @abstractmethod
    def _record(self, step: Step, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Note the rotation of the new tokens: cos and sin as the model gives them, [1 or batch, tokens, width]."""
