"""Numbers of GGML's groups of 32, for kernels that read vectors as they are stored (`gpu_ops.slot_formats`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpacked(vector, number, is_there, BITS: tl.constexpr, BYTES: tl.constexpr):
    """Numbers of vectors that begin at the addresses `vector`, of groups of `BYTES` bytes: float32."""
    group, within = vector + number // 32 * BYTES, number % 32
    scale = tl.load(group.to(tl.pointer_type(tl.float16)), mask=is_there, other=0.0).to(tl.float32)
    if BITS == 8:
        code = tl.load(group + 2 + within, mask=is_there, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    else:
        both = tl.load(group + 2 + within % 16, mask=is_there, other=0).to(tl.int32)
        code = tl.where(within < 16, both & 15, both >> 4) - 8
    return scale * code.to(tl.float32)


@triton.jit
def vectors_at(vector, number, is_there, BITS: tl.constexpr, BYTES: tl.constexpr):
    """As `unpacked`, also of plain numbers (`BITS` is 0)."""
    if BITS == 0:
        return tl.load(vector + number, mask=is_there, other=0.0).to(tl.float32)
    return unpacked(vector, number, is_there, BITS, BYTES)
