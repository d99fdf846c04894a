"""What the cache layers of all operators have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


class OperatorLayer(CacheLayerMixin):
    """A layer whose operator stores what its attention receives, and that can go back and go two ways."""

    is_sliding = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the new keys and values on to the operator, which stores what its attention receives."""
        return key_states, value_states

    @abstractmethod
    def checkpoint(self) -> Any:
        """What `restore` needs to come back to the present state."""

    @abstractmethod
    def restore(self, checkpoint: Any) -> None:
        """Forget what was stored since `checkpoint`."""

    @abstractmethod
    def fork(self, memo: dict[int, Any]) -> OperatorLayer:
        """A second layer with the same tokens; `memo` as for copy.deepcopy, one for all layers of a cache."""

    # -- what others ask

    @property
    def statistics(self) -> dict[str, float | int | None]:
        """What the layer has counted, by name; None under a name that it has no value for yet."""
        return {}
