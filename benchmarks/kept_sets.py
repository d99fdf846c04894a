"""Compares the tokens that two token-dropping methods keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Overlap:
    """The overlap of two methods' sets in one layer.

    Attributes:
        kept: tokens per kv head that each of the two methods keeps.
        shares: per kv head, the tokens that both keep as a share of the larger set; 1 for equal sets.
        spread: over pairs of tokens of which each method keeps another one, the largest difference of scores as a share
            of the lowest kept score. Rounding alone leaves it near the dtype's precision; 0 if one set contains the
            other.
    """

    kept: tuple[int, int]
    shares: tuple[float, ...]
    spread: float


def overlap(ours: torch.Tensor, theirs: torch.Tensor, scores: torch.Tensor) -> Overlap:
    """Compare the tokens of one layer.

    Args:
        ours, theirs: distinct positions, [kv_heads, kept] int64; `kept` may differ.
        scores: the scores that ranked `theirs`, [kv_heads, length].
    """
    shares, spread = [], 0.0
    for mine, other, score in zip(ours, theirs, scores.double(), strict=True):
        both = int(torch.isin(mine, other).sum())
        shares.append(both / max(len(mine), len(other)))
        only_mine, only_other = mine[~torch.isin(mine, other)], other[~torch.isin(other, mine)]
        if len(only_mine) and len(only_other):
            apart = (score[only_other].max() - score[only_mine].min()) / score[other].min()
            spread = max(spread, float(apart))
    return Overlap((ours.shape[1], theirs.shape[1]), tuple(shares), spread)


def thirds(layers: int) -> dict[str, slice]:
    """The lower, middle and upper layers."""
    first, second = round(layers / 3), round(2 * layers / 3)
    return {"lower": slice(0, first), "middle": slice(first, second), "upper": slice(second, layers)}


def row(layers: Sequence[Overlap]) -> dict[str, float | int | list[float]]:
    """Figures over a model's layers: the mean share in each third of the layers and over all, the lowest, and others.

    `equal` of `sets` are equal; `kept` is the mean over layers, ours and theirs.
    """
    by_layer = torch.tensor([layer.shares for layer in layers], dtype=torch.float64)
    named = {name: float(by_layer[part].mean()) for name, part in thirds(len(layers)).items()}
    kept = torch.tensor([layer.kept for layer in layers], dtype=torch.float64).mean(dim=0)
    return {
        **named,
        "mean": float(by_layer.mean()),
        "lowest": float(by_layer.min()),
        "equal": int((by_layer == 1).sum()),
        "sets": by_layer.numel(),
        "spread": max(layer.spread for layer in layers),
        "kept": kept.tolist(),
    }
