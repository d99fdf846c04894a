"""Pseudo-random numbers by position, kv head and layer, independent of history and of how a prompt is split.

On a GPU each call is one launch of a Triton kernel where Triton runs; the torch functions define the results.
"""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton

# The number of bits that float32 represents exactly.
_BITS = 24
_LAYER, _SEED = 104_729, 15_485_863
# SplitMix64's finaliser; int64 wraps around.
_SHIFTS, _LAST_SHIFT = (30, 27), 31

FACTORS = 1_000_003, 7_919, -4658895280553007687, -7723592293110705685
"""Factors of positions, of heads, and of the two rounds of mixing."""


def drawn(positions: torch.Tensor, seed: int, layer_idx: int) -> torch.Tensor:
    """Uniformly distributed integers: positions [batch, kv_heads, count] int64 -> the same shape, int64."""
    constant = layer_idx * _LAYER + seed * _SEED
    return _by_kernel(positions, constant, 0) if _is_served(positions) else mixed_in_torch(positions, constant)


def uniform(positions: torch.Tensor, seed: int, layer_idx: int) -> torch.Tensor:
    """Numbers in [0, 1): positions [batch, kv_heads, count] int64 -> the same shape, float32."""
    constant = layer_idx * _LAYER + seed * _SEED
    if _is_served(positions):
        return _by_kernel(positions, constant, _BITS)
    return share_in_torch(mixed_in_torch(positions, constant))


def mixed_in_torch(positions: torch.Tensor, constant: int) -> torch.Tensor:
    """`drawn`, with seed and layer combined in `constant`."""
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    of_position, of_head, *rounds = FACTORS
    mixed = positions * of_position + heads * of_head + constant
    for shift, factor in zip(_SHIFTS, rounds, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> _LAST_SHIFT)


def share_in_torch(mixed: torch.Tensor) -> torch.Tensor:
    """`uniform` from `mixed` integers, float32."""
    return (mixed & ((1 << _BITS) - 1)).float() / (1 << _BITS)


def _is_served(positions: torch.Tensor) -> bool:
    return runs_triton(positions) and positions.stride(-1) == 1


def _by_kernel(positions: torch.Tensor, constant: int, bits: int) -> torch.Tensor:
    from hetero_kv.gpu_ops.triton_kernels import draws

    with torch.cuda.device(positions.device):
        return draws.draw(positions, constant, FACTORS, bits)
