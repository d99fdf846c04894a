"""Draws by position in one pass; `gpu_ops.draws.mixed_in_torch` and `share_in_torch` define the results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["count", "constant"])
def _draw(
    positions, out, count, heads, row_stride, head_stride, constant,
    OF_POSITION: tl.constexpr, OF_HEAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(1).to(tl.int64)
    head = each % heads
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < count
    position = tl.load(positions + each // heads * row_stride + head * head_stride + entry, mask=is_entry, other=0)
    mixed = position * OF_POSITION + head * OF_HEAD + constant
    mixed = (mixed ^ (mixed >> 30)) * FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    mixed = mixed ^ (mixed >> 31)
    if BITS > 0:
        share = (mixed & ((1 << BITS) - 1)).to(tl.float32) * (1.0 / (1 << BITS))
        tl.store(out + each * count + entry, share, mask=is_entry)
    else:
        tl.store(out + each * count + entry, mixed, mask=is_entry)


def draw(positions: torch.Tensor, constant: int, factors: tuple[int, int, int, int], bits: int) -> torch.Tensor:
    """`gpu_ops.draws.mixed_in_torch`, or `share_in_torch` of its low `bits` if `bits` is not 0.

    Args:
        constant: added to all positions.
        factors: of positions, of heads, and of the first and second round of mixing.
    """
    batch, heads, count = positions.shape
    out = torch.empty(positions.shape, dtype=torch.float32 if bits else torch.int64, device=positions.device)
    if out.numel():
        of = dict(zip(("OF_POSITION", "OF_HEAD", "FIRST", "SECOND"), factors, strict=True))
        numbers = count, heads, *positions.stride()[:2], constant
        _draw[(triton.cdiv(count, _BLOCK), batch * heads)](positions, out, *numbers, **of, BITS=bits, BLOCK=_BLOCK)
    return out
