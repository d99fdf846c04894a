"""Checkpoints: copies of what layers cannot return to by dropping tokens, so that a sequence can be cut there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerCheckpoint:
    """A copy of one layer's state.

    Attributes:
        state: what the layer's `return_to` takes; it stays valid for several returns.
        nbytes: its memory.
    """

    state: Any
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A sequence's state behind its first `length` tokens, without what every layer keeps of them anyway.

    Attributes:
        layers: layer -> its copy, for layers that do not keep every token: recurrent states and sliding windows.
    """

    length: int
    layers: Mapping[int, LayerCheckpoint]

    @property
    def nbytes(self) -> int:
        """The memory of all copies."""
        return sum(layer.nbytes for layer in self.layers.values())
