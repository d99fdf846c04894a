"""Blocks in a GPU's slots that stay as they are stored: GGML's groups of 32 numbers behind a scale in half precision.

Slots take then what DRAM takes, and as much crosses the bus; a kernel unpacks what it attends to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, NamedTuple

import torch

from hetero_kv.gpu_ops.row_memory import AnyMemory, Memory

GROUP = 32
#: Bytes of a group, by the bits of a number (Q8_0 and Q4_0; https://github.com/ggml-org/ggml, ggml-common.h).
GROUP_BYTES = {8: 34, 4: 18}


class Slots(NamedTuple, Generic[AnyMemory]):
    """The blocks in slots; contiguous.

    Attributes:
        keys, values: [batch, kv_heads, n, block_size, dim], or [..., bytes] uint8 of groups.
        offsets: [batch, kv_heads, n, 1, k_dim] float16, added to the keys of a block; None for none.
    """

    keys: AnyMemory
    values: AnyMemory
    offsets: AnyMemory | None = None


def bits_of(slots: Memory, dim: int) -> int:
    """Bits of a number in slots of vectors of `dim` numbers, 0 where they are not packed.

    Raises ValueError for bytes of no known format.
    """
    if slots.dtype != torch.uint8:
        return 0
    for bits, group_bytes in GROUP_BYTES.items():
        if slots.shape[-1] * GROUP == dim * group_bytes:
            return bits
    raise ValueError(f"{slots.shape[-1]} bytes are no vector of {dim} numbers in Q8_0 or Q4_0")


def unpacked(slots: torch.Tensor, dim: int) -> torch.Tensor:
    """The numbers of slots [..., dim] or [..., bytes], as float32 [..., dim]."""
    bits = bits_of(slots, dim)
    if not bits:
        return slots.float()
    groups = slots.unflatten(-1, (dim // GROUP, GROUP_BYTES[bits]))
    scales, codes = groups[..., :2].contiguous().view(torch.float16).float(), groups[..., 2:]
    if bits == 8:
        return (scales * codes.contiguous().view(torch.int8)).flatten(-2)
    return (scales * (torch.cat([codes & 15, codes >> 4], dim=-1).float() - 8.0)).flatten(-2)


def as_words(array: AnyMemory) -> AnyMemory:
    """Blocks [..., ..., block_size, bytes] as int64, of which a GPU's thread reads eight bytes at once.

    Returns other arrays as they are. A block of 16 vectors, the fewest of packed ones, is a multiple of eight bytes.
    """
    if array.dtype != torch.uint8:
        return array
    if isinstance(array, torch.Tensor):
        return array.flatten(-2).view(torch.int64)
    *outer, size, width = array.of_row
    flat = replace(array, of_row=(*outer, size * width), strides=(*array.strides[:-2], 1))
    return flat.viewed(torch.int64)
