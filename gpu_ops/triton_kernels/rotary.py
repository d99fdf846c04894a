"""Rotates vectors, or rotates them back, in one pass; `gpu_ops.rotary`'s torch functions define the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.rotary import RotaryLayout

_ELEMENTS = 4096


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    x, cos, sin, out, tokens, heads, x_row, x_head, x_token, out_row, out_head, out_token, cos_token, sin_token,
    DIM: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(1).to(tl.int64)
    row, head = each // heads, each % heads
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    source = x + row * x_row + head * x_head + token[:, None] * x_token
    turned = out + row * out_row + head * out_head + token[:, None] * out_token
    if PAIRS > 0:
        pair = tl.arange(0, BLOCK_PAIRS)
        is_number = is_token[:, None] & (pair < PAIRS)[None, :]
        # Both are compile-time constants: pairs are adjacent, or (i, i + PAIRS).
        first = OFFSET + (2 * pair if INTERLEAVED else pair)
        second = first + (1 if INTERLEAVED else PAIRS)
        a = tl.load(source + first[None, :], mask=is_number, other=0.0).to(tl.float32)
        b = tl.load(source + second[None, :], mask=is_number, other=0.0).to(tl.float32)
        c = tl.load(cos + token[:, None] * cos_token + pair[None, :], mask=is_number, other=0.0).to(tl.float32)
        s = tl.load(sin + token[:, None] * sin_token + pair[None, :], mask=is_number, other=0.0).to(tl.float32)
        if INVERSE:
            # Masked lanes must not divide by zero.
            determinant = tl.where(is_number, c * c + s * s, 1.0)
            c, s = c / determinant, -s / determinant
        tl.store(turned + first[None, :], (a * c - b * s).to(out.dtype.element_ty), mask=is_number)
        tl.store(turned + second[None, :], (b * c + a * s).to(out.dtype.element_ty), mask=is_number)
    if DIM > 2 * PAIRS:
        rest = tl.arange(0, BLOCK_REST)
        channel = tl.where(rest < OFFSET, rest, rest + 2 * PAIRS)
        is_rest = is_token[:, None] & (rest < DIM - 2 * PAIRS)[None, :]
        plain = tl.load(source + channel[None, :], mask=is_rest, other=0.0).to(tl.float32)
        tl.store(turned + channel[None, :], plain.to(out.dtype.element_ty), mask=is_rest)


def rotate_into(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout, out: torch.Tensor,
    inverse: bool = False,
) -> None:  # fmt: skip
    """As `gpu_ops.rotary.rotate_into_in_torch`, or `unrotate_into_in_torch` for the `inverse`.

    The last dimension of every argument is contiguous.
    """
    batch, heads, tokens, dim = x.shape
    if x.numel() == 0:
        return
    block = triton.next_power_of_2(dim)
    rows = max(1, min(_ELEMENTS // block, triton.next_power_of_2(tokens)))
    _rotate[(triton.cdiv(tokens, rows), batch * heads)](
        x, cos, sin, out, tokens, heads, *x.stride()[:3], *out.stride()[:3], cos.stride(0), sin.stride(0),
        DIM=dim, PAIRS=layout.pairs, OFFSET=layout.offset, INTERLEAVED=layout.interleaved, INVERSE=inverse,
        BLOCK_PAIRS=triton.next_power_of_2(max(1, layout.pairs)),
        BLOCK_REST=triton.next_power_of_2(max(1, dim - 2 * layout.pairs)), TOKENS=rows,
    )  # fmt: skip
