"""Rows of memory in a kernel: side by side, or where a table of addresses says."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.row_memory import Memory, RowMemory

_KINDS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}


@triton.jit
def row_of(memory, row, stride, KIND: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where a row begins: of numbers of `KIND` by the address in `memory`, or `stride` behind the row before."""
    if ALIGNMENT == 0:
        found = memory + row * stride
    else:
        found = tl.multiple_of(tl.load(memory + row).to(tl.pointer_type(KIND)), ALIGNMENT)
    return found


@triton.jit
def has_row(memory, row, ALIGNMENT: tl.constexpr):
    """Whether a row has memory."""
    return row >= 0 if ALIGNMENT == 0 else tl.load(memory + row) != 0


def step_of(number: Any) -> int:
    """How far apart the rows' numbers are: of a tensor [batch]; 0 for one number that all rows share."""
    return number.stride(0) if isinstance(number, torch.Tensor) and len(number) > 1 else 0


def pointer(memory: Memory) -> torch.Tensor:
    """What a kernel receives in the place of `memory`."""
    return memory.addresses if isinstance(memory, RowMemory) else memory


def kind(memory: Memory) -> Any:
    """Triton's name of the numbers' type."""
    return _KINDS[memory.dtype]


def alignment(*memories: Memory) -> int:
    """Bytes of which all rows' addresses are a multiple; 0 where rows lie side by side.

    Raises ValueError for memory of both kinds.
    """
    found = [each.alignment if isinstance(each, RowMemory) else 0 for each in memories]
    if 0 in found and any(found):
        raise ValueError("of a kernel's arguments all rows are found by addresses, or none")
    return math.gcd(*found)
