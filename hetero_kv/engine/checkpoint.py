"""Checkpoints: copies of states that layers cannot restore by dropping tokens, so that a sequence can be cut there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerCheckpoint:
    """A copy of one layer's state.

    Attributes:
        state: the argument of the layer's `return_to`; it stays valid for several returns.
        nbytes: its memory.
    """

    state: Any
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A sequence's state after its first `length` tokens, without what layers keep of them anyway.

    Attributes:
        layers: layer -> its copy, for layers that do not keep every token: recurrent states and sliding windows.
    """

    length: int
    layers: Mapping[int, LayerCheckpoint]

    @property
    def nbytes(self) -> int:
        """The memory of all copies."""
        return sum(layer.nbytes for layer in self.layers.values())
