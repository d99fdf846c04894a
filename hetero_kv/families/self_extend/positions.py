"""Grouped positions (Self-Extend, Jin et al. 2024, arXiv:2401.01325), applied to vectors that are already rotated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.gpu_ops.rotary import rotate_into, unrotate_into


@dataclass(frozen=True)
class GroupedPositions:
    """Maps positions to grouped ones. A key beyond a query's neighbours has its position divided by `group`.

    The query's grouped position is chosen so that the nearest of these keys keeps its distance.

    Attributes:
        group: tokens that share a position, G.
        neighbours: the number of keys that keep their distance to the query, itself included, w.
    """

    group: int
    neighbours: int

    def of_keys(self, positions: torch.Tensor) -> torch.Tensor:
        """Grouped positions of keys, p // G."""
        return positions // self.group

    def of_queries(self, positions: torch.Tensor) -> torch.Tensor:
        """Grouped positions of queries: p // G + w - w // G; p itself below w, where all keys are neighbours."""
        grouped = positions // self.group + self.neighbours - self.neighbours // self.group
        return torch.where(positions < self.neighbours, positions, grouped)

    def grouped_keys(self, keys: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """Rotate keys [batch, kv_heads, n, dim] from their own positions, from `start` on, to their grouped ones."""
        own, grouped = _own(keys, start, table), _shared(keys, start, table, self.of_keys)
        return _rotated_to(keys, own, grouped, table)

    def neighbouring_keys(self, grouped: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """The inverse of `grouped_keys`: rotate keys from grouped positions back to their own."""
        own, shared = _own(grouped, start, table), _shared(grouped, start, table, self.of_keys)
        return _rotated_to(grouped, shared, own, table)

    def grouped_queries(self, q: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """Rotate queries [batch, heads, n, dim] from their own positions, from `start` on, to their grouped ones."""
        own, grouped = _own(q, start, table), _shared(q, start, table, self.of_queries)
        return _rotated_to(q, own, grouped, table)

    def neighbouring_queries(self, grouped: torch.Tensor, start: int, table: RotaryTable) -> torch.Tensor:
        """The inverse of `grouped_queries`: rotate queries from grouped positions back to their own."""
        own, shared = _own(grouped, start, table), _shared(grouped, start, table, self.of_queries)
        return _rotated_to(grouped, shared, own, table)


#: Cosines and sines [n, pairs] of a rotation.
_Angles = tuple[torch.Tensor, torch.Tensor]


def _own(vectors: torch.Tensor, start: int, table: RotaryTable) -> _Angles:
    """The angles of the n positions from `start` on, one per vector of [batch, heads, n, dim]; views."""
    at = slice(start, start + vectors.shape[2])
    return table.cos[at], table.sin[at]


def _shared(
    vectors: torch.Tensor, start: int, table: RotaryTable, of: Callable[[torch.Tensor], torch.Tensor]
) -> _Angles:
    """The angles of the positions that `of` maps those n positions to."""
    if vectors.shape[2] == 1:
        # The host computes a single token's position without launching a kernel.
        return _own(vectors, int(of(torch.tensor(start))), table)
    at = of(torch.arange(start, start + vectors.shape[2], device=vectors.device))
    return table.cos[at], table.sin[at]


def _rotated_to(vectors: torch.Tensor, present: _Angles, target: _Angles, table: RotaryTable) -> torch.Tensor:
    """Rotate vectors [batch, heads, n, dim] from their `present` angles to the `target` angles, in their dtype."""
    layout = table.rotation.layout
    plain = torch.empty(vectors.shape, dtype=torch.float32, device=vectors.device)
    unrotate_into(vectors, *present, layout, plain)
    turned = torch.empty(vectors.shape, dtype=vectors.dtype, device=vectors.device)
    rotate_into(plain, *target, layout, turned)
    return turned
