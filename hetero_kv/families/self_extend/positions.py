"""Grouped positions (Self-Extend, Jin et al. 2024, arXiv:2401.01325), by turning what is rotated already."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_ops.rotary import rotate, unrotate
from hetero_kv.adapter.rotary_table import RotaryTable


@dataclass(frozen=True)
class GroupedPositions:
    """Keys beyond the neighbours of a query stand at their position divided by `group`, and the query so that the
    nearest of them is as far as it is.

    Attributes:
        group: tokens that share a position, G.
        neighbours: keys of a query that keep their positions, itself included, w.
    """

    group: int
    neighbours: int

    def of_keys(self, positions: torch.Tensor) -> torch.Tensor:
        """p // G."""
        return positions // self.group

    def of_queries(self, positions: torch.Tensor) -> torch.Tensor:
        """p // G + w - w // G; p itself before w, where all keys are neighbours."""
        grouped = positions // self.group + self.neighbours - self.neighbours // self.group
        return torch.where(positions < self.neighbours, positions, grouped)

    def grouped_keys(self, keys: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """Keys [batch, kv_heads, n, dim] that are rotated to the positions from `start` on, at their grouped ones."""
        positions = _from(start, keys)
        return _turned(keys, positions, self.of_keys(positions), table)

    def neighbouring_keys(self, grouped: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """What `grouped_keys` came from."""
        positions = _from(start, grouped)
        return _turned(grouped, self.of_keys(positions), positions, table)

    def grouped_queries(self, q: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """Queries [batch, heads, n, dim] that are rotated to the positions from `start` on, at their grouped ones."""
        positions = _from(start, q)
        return _turned(q, positions, self.of_queries(positions), table)

    def neighbouring_queries(self, grouped: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """What `grouped_queries` came from."""
        positions = _from(start, grouped)
        return _turned(grouped, self.of_queries(positions), positions, table)


def _from(start: int, vectors: torch.Tensor) -> torch.Tensor:
    return torch.arange(start, start + vectors.shape[2], device=vectors.device)


def _turned(vectors: torch.Tensor, given: torch.Tensor, wanted: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Vectors [batch, heads, n, dim] rotated to the positions `given` [n], rotated to `wanted`, in their dtype."""
    layout = table.rotation.layout
    plain = unrotate(vectors, table.cos[given], table.sin[given], layout)
    return rotate(plain, table.cos[wanted], table.sin[wanted], layout).to(vectors.dtype)
