"""Soft-capping of scores (Gemma 2) for attention kernels, and the base of their exponentials."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softcapped(scores, softcap):
    """softcap * tanh(scores / softcap), for float32."""
    # tanh from the exponential of a number that is not positive, which cannot overflow.
    small = tl.exp2(tl.abs(scores) * (-2 * LOG2_E / softcap))
    capped = softcap * ((1 - small) / (1 + small))
    return tl.where(scores < 0, -capped, capped)
