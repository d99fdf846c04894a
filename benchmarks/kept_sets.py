"""How far two methods that drop tokens keep the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Overlap:
    """The sets of one layer beside each other.

    Attributes:
        held: tokens that either keeps per kv head.
        shares: per kv head, tokens that both keep, as a share of the greater set; 1 where the sets are equal.
        spread: how far apart two tokens are of which one method keeps the first and the other the second, at most: the
            difference of their scores as a share of the lowest score that is kept. Rounding alone leaves it near the
            precision of the type; 0 without such tokens, where one set contains the other.
    """

    held: tuple[int, int]
    shares: tuple[float, ...]
    spread: float


def overlap(ours: torch.Tensor, theirs: torch.Tensor, scores: torch.Tensor) -> Overlap:
    """Compare the tokens of one layer.

    Args:
        ours, theirs: [kv_heads, held] int64 positions, each once; `held` may differ.
        scores: [kv_heads, length], what `theirs` was ranked by.
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
    """A model's layers in figures: the mean share in each third of the layers, and over all; the lowest; and the rest.

    `equal` of `sets` are the same; `held` is the mean over layers, ours and theirs.
    """
    by_layer = torch.tensor([layer.shares for layer in layers], dtype=torch.float64)
    named = {name: float(by_layer[part].mean()) for name, part in thirds(len(layers)).items()}
    held = torch.tensor([layer.held for layer in layers], dtype=torch.float64).mean(dim=0)
    return {
        **named,
        "mean": float(by_layer.mean()),
        "lowest": float(by_layer.min()),
        "equal": int((by_layer == 1).sum()),
        "sets": by_layer.numel(),
        "spread": max(layer.spread for layer in layers),
        "held": held.tolist(),
    }
