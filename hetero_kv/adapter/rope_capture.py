"""RoPE capture: attention operators that record the rotation of every token before each forward."""

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


class RopeCapture(AttentionOperator):
    """An operator that gets the rotations of new tokens (`_record`) before it sees their keys.

    Attributes:
        rotation: how the wrapped module rotates; None before the first forward.
    """

    changes_arguments = True
    #: The use of the rotations, and the remedy if there are none; a text for errors.
    rotation_use: ClassVar[str]

    def __init__(self, path: str, wrapped: Any, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.rotation: Rotation | None = None

    def arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Records the rotations of the tokens' positions."""
        cos, sin = position_embeddings(self.path, self.wrapped, kwargs, self.rotation_use)
        if self.rotation is None:
            self.rotation = rotation_of(self.path, self.wrapped, args, kwargs, self.rotation_use)
        for step in bridge.cache_in(args, kwargs, self.path).required_batch.steps:
            self._record(step, self.rotation, of_rows(cos, step.rows), of_rows(sin, step.rows))
        return kwargs

    def lasting_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs

    @abstractmethod
    def _record(self, step: Step, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Record the new tokens' rotation: cos and sin as the model passes them, [1 or batch, tokens, width]."""
