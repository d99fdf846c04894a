"""Coarse copies of keys, by which blocks are scored: differences to the block's mean key in four bits a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_kv.cpu_ops.int4_key_scores import CHANNELS, TOKENS, bytes_of_block

if TYPE_CHECKING:
    import torch

_ZERO, _LARGEST = 8, 15


def has_key_codes(block_size: int) -> bool:
    """Whether blocks of `block_size` tokens have coarse copies: only whole tiles do."""
    return block_size % TOKENS == 0


def encode(differences: torch.Tensor) -> torch.Tensor:
    """Encode key differences [blocks, kv_heads, block_size, k_dim] float32 in the format of `cpu_ops.int4_key_scores`.

    A token's scale is its number of largest magnitude divided by -8, as in GGML's Q4_0, so that this number is exact.

    Returns [blocks, kv_heads, 1, bytes_of_block] uint8.
    """
    import torch

    blocks, kv_heads, block_size, k_dim = differences.shape
    most = differences.gather(-1, differences.abs().argmax(dim=-1, keepdim=True))
    largest = torch.finfo(torch.float16).max
    scales = (most / -_ZERO).clamp(-largest, largest).half()
    inverse = 1.0 / scales.float()
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)
    codes = (differences * inverse + _ZERO).round().clamp(0, _LARGEST).to(torch.uint8)
    padded = -(-k_dim // CHANNELS) * CHANNELS
    codes = torch.nn.functional.pad(codes, (0, padded - k_dim), value=_ZERO)
    tiles = codes.reshape(blocks, kv_heads, block_size // TOKENS, TOKENS, padded // CHANNELS, 2, CHANNELS // 2)
    low, high = tiles.transpose(3, 4).unbind(dim=5)
    packed = (low | (high << 4)).flatten(2)
    scale_bytes = scales.squeeze(-1).contiguous().view(torch.uint8)
    found = torch.cat([packed, scale_bytes], dim=-1).unsqueeze(2)
    assert found.shape[-1] == bytes_of_block(block_size, k_dim)
    return found
