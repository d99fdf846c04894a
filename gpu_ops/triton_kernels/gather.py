"""Rows in DRAM read directly by a kernel; `gpu_ops.gather.gathered_rows_by_copy` defines the result.

A page-locked tensor has an address that the GPU reads over the bus. Through it a kernel fetches scattered rows without
the CPU, and without an intermediate buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _gather(stored, where, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(where + row)
    found = tl.load(stored + source * width + column, mask=column < width)
    tl.store(out + row * width + column, found, mask=column < width)


def gathered_rows(stored: torch.Tensor, where: torch.Tensor, out: torch.Tensor) -> None:
    """Write the rows `where` [n] int64, on `out`'s device, of `stored` [rows, ...] to `out` [n, ...].

    Both are contiguous and of one dtype; `stored` is on the device too, or page-locked in DRAM.
    """
    width = out[0].numel() if len(out) else 0
    if width:
        # Viewed as integers of the same size, which halves the kernels to compile.
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]
        _gather[(len(out), triton.cdiv(width, _BLOCK))](stored.view(kind), where, out.view(kind), width, BLOCK=_BLOCK)
