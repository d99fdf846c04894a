"""Merges two partial attentions in one pass; `gpu_ops.merge.merge_attention_in_torch` defines the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out, lse, rows, heads, tokens,
    a0, a1, a2, a3, b0, b1, b2, b3, la0, la1, la2, lb0, lb1, lb2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    is_row = row < rows
    is_number = is_row[:, None] & (column < DIM)[None, :]
    i, j, k = row // tokens // heads, row // tokens % heads, row % tokens

    part_a = tl.load(lse_a + i * la0 + j * la1 + k * la2, mask=is_row, other=float("-inf")).to(tl.float32)
    part_b = tl.load(lse_b + i * lb0 + j * lb1 + k * lb2, mask=is_row, other=float("-inf")).to(tl.float32)
    largest = tl.maximum(part_a, part_b)
    # If both sets are empty every weight is 0, not exp(nan).
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(part_a - base), tl.exp(part_b - base)
    total = weight_a + weight_b
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(lse + row, tl.where(total > 0, base + tl.log(divisor), float("-inf")), mask=is_row)

    at_a = (i * a0 + j * a1 + k * a2)[:, None] + column[None, :] * a3
    at_b = (i * b0 + j * b1 + k * b2)[:, None] + column[None, :] * b3
    values_a = tl.load(out_a + at_a, mask=is_number, other=0.0).to(tl.float32)
    values_b = tl.load(out_b + at_b, mask=is_number, other=0.0).to(tl.float32)
    merged = values_a * (weight_a / divisor)[:, None] + values_b * (weight_b / divisor)[:, None]
    tl.store(out + row[:, None] * DIM + column[None, :], merged.to(out.dtype.element_ty), mask=is_number)


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gpu_ops.merge.merge_attention_in_torch`, for parts [batch, heads, tokens, v_dim] of any strides."""
    batch, heads, tokens, dim = out_a.shape
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    rows = batch * heads * tokens
    if rows == 0:
        return out, lse
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(1, _ELEMENTS // block_dim)
    _merge[(triton.cdiv(rows, block_rows),)](
        out_a, lse_a, out_b, lse_b, out, lse, rows, heads, tokens,
        *out_a.stride(), *out_b.stride(), *lse_a.stride(), *lse_b.stride(),
        DIM=dim, BLOCK_DIM=block_dim, BLOCK_ROWS=block_rows,
    )  # fmt: skip
    return out, lse
