"""Numbers drawn by position, kv head and layer: the same whatever came before, and however a prompt is cut."""

from __future__ import annotations

import torch

# As many bits as float32 holds exactly.
_BITS = 24


def drawn(positions: torch.Tensor, seed: int, layer_idx: int) -> torch.Tensor:
    """Numbers that look uniform: positions [batch, kv_heads, count] int64 -> the same shape, int64."""
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    mixed = positions * 1_000_003 + heads * 7_919 + layer_idx * 104_729 + seed * 15_485_863
    # SplitMix64's finaliser; int64 wraps around.
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> 31)


def uniform(positions: torch.Tensor, seed: int, layer_idx: int) -> torch.Tensor:
    """Numbers of 0 up to and without 1: positions [batch, kv_heads, count] int64 -> the same shape, float32."""
    return (drawn(positions, seed, layer_idx) & ((1 << _BITS) - 1)).float() / (1 << _BITS)
