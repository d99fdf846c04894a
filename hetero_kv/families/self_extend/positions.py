"""Grouped positions (Self-Extend, Jin et al. 2024, arXiv:2401.01325), by turning what is rotated already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_ops.rotary import rotate_into, unrotate_into
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
        own, grouped = _own(keys, start, table), _shared(keys, start, table, self.of_keys)
        return _turned(keys, own, grouped, table)

    def neighbouring_keys(self, grouped: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """What `grouped_keys` came from."""
        own, given = _own(grouped, start, table), _shared(grouped, start, table, self.of_keys)
        return _turned(grouped, given, own, table)

    def grouped_queries(self, q: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """Queries [batch, heads, n, dim] that are rotated to the positions from `start` on, at their grouped ones."""
        own, grouped = _own(q, start, table), _shared(q, start, table, self.of_queries)
        return _turned(q, own, grouped, table)

    def neighbouring_queries(self, grouped: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """What `grouped_queries` came from."""
        own, given = _own(grouped, start, table), _shared(grouped, start, table, self.of_queries)
        return _turned(grouped, given, own, table)


#: Cosines and sines [n, pairs] of a rotation.
_Angles = tuple[torch.Tensor, torch.Tensor]


def _own(vectors: torch.Tensor, start: int, table: RotaryTable) -> _Angles:
    """Those of the positions from `start` on, of which vectors [batch, heads, n, dim] have one each; views."""
    at = slice(start, start + vectors.shape[2])
    return table.cos[at], table.sin[at]


def _shared(
    vectors: torch.Tensor, start: int, table: RotaryTable, of: Callable[[torch.Tensor], torch.Tensor]
) -> _Angles:
    """Those of the positions that `of` says, likewise."""
    if vectors.shape[2] == 1:
        # A token's position is the host's to know: nothing is launched to find it.
        return _own(vectors, int(of(torch.tensor(start))), table)
    at = of(torch.arange(start, start + vectors.shape[2], device=vectors.device))
    return table.cos[at], table.sin[at]


def _turned(vectors: torch.Tensor, given: _Angles, wanted: _Angles, table: RotaryTable) -> torch.Tensor:
    """Vectors [batch, heads, n, dim] that are rotated by the angles `given`, rotated by `wanted`, in their dtype."""
    layout = table.rotation.layout
    plain = torch.empty(vectors.shape, dtype=torch.float32, device=vectors.device)
    unrotate_into(vectors, *given, layout, plain)
    turned = torch.empty(vectors.shape, dtype=vectors.dtype, device=vectors.device)
    rotate_into(plain, *wanted, layout, turned)
    return turned
