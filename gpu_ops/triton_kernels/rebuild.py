"""Reconstructs keys of chosen chunks in one pass: gather coefficients, multiply by the basis, rotate, write.

`gpu_ops.rebuild.rebuilt_chunks_in_torch` defines the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.rotary import RotaryLayout

_TOKENS, _RANK = 32, 32


@triton.jit
def _columns_of(
    rows, is_token, basis, basis_rank, channel, is_channel,
    RANK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Coefficients at `rows` times the columns `channel` of a basis: [tokens, channels] float32."""
    total = tl.zeros([BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32)
    for start in range(0, RANK, BLOCK_RANK):
        r = start + tl.arange(0, BLOCK_RANK)
        left = tl.load(rows[:, None] + r[None, :], mask=is_token[:, None] & (r < RANK)[None, :], other=0.0)
        right = tl.load(
            basis + r[:, None] * basis_rank + channel[None, :],
            mask=(r < RANK)[:, None] & is_channel[None, :],
            other=0.0,
        )
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision=PRECISION)
    return total


@triton.jit
def _rebuild(
    coefficients, basis, cos, sin, chunks, slots, out, count, heads, out_head,
    coefficients_batch, coefficients_token, basis_batch, basis_head, basis_rank, cos_row, sin_row,
    SLOTTED: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = token < count * CHUNK
    first_listed = tl.program_id(1).to(tl.int64) * count
    listed = first_listed + token // CHUNK
    # Loads of chunks and slots share one mask: Triton 3.6 does not compile a load whose mask comes from another load.
    chunk = tl.load(chunks + listed, mask=is_token, other=0)
    slot = (token // CHUNK).to(tl.int64)
    if SLOTTED:
        # Missing chunks come first; after the end of their list there is nothing to do.
        if tl.load(chunks + first_listed + tl.program_id(0) * BLOCK_TOKENS // CHUNK) < 0:
            return
        slot = tl.load(slots + listed, mask=is_token, other=-1)
        is_token = is_token & (slot >= 0)
    position = chunk * CHUNK + token % CHUNK
    rows = coefficients + row * coefficients_batch + position * coefficients_token
    own_basis = basis + row * basis_batch + head * basis_head
    written = out + tl.program_id(1).to(tl.int64) * out_head + (slot * CHUNK + token % CHUNK)[:, None] * DIM

    if PAIRS > 0:
        pair = tl.arange(0, BLOCK_PAIRS)
        is_pair = pair < PAIRS
        # Both are compile-time constants: pairs are adjacent, or (i, i + PAIRS).
        first = OFFSET + (2 * pair if INTERLEAVED else pair)
        second = first + (1 if INTERLEAVED else PAIRS)
        a = _columns_of(
            rows, is_token, own_basis, basis_rank, first, is_pair, RANK, PRECISION, BLOCK_TOKENS, BLOCK_RANK,
            BLOCK_PAIRS,
        )  # fmt: skip
        b = _columns_of(
            rows, is_token, own_basis, basis_rank, second, is_pair, RANK, PRECISION, BLOCK_TOKENS, BLOCK_RANK,
            BLOCK_PAIRS,
        )  # fmt: skip
        is_number = is_token[:, None] & is_pair[None, :]
        c = tl.load(cos + position[:, None] * cos_row + pair[None, :], mask=is_number, other=0.0).to(tl.float32)
        s = tl.load(sin + position[:, None] * sin_row + pair[None, :], mask=is_number, other=0.0).to(tl.float32)
        tl.store(written + first[None, :], (a * c - b * s).to(out.dtype.element_ty), mask=is_number)
        tl.store(written + second[None, :], (b * c + a * s).to(out.dtype.element_ty), mask=is_number)

    if DIM > 2 * PAIRS:
        rest = tl.arange(0, BLOCK_REST)
        is_rest = rest < DIM - 2 * PAIRS
        channel = tl.where(rest < OFFSET, rest, rest + 2 * PAIRS)
        plain = _columns_of(
            rows, is_token, own_basis, basis_rank, channel, is_rest, RANK, PRECISION, BLOCK_TOKENS, BLOCK_RANK,
            BLOCK_REST,
        )  # fmt: skip
        tl.store(written + channel[None, :], plain.to(out.dtype.element_ty), mask=is_token[:, None] & is_rest[None, :])


def rebuilt_chunks(
    coefficients: torch.Tensor,
    basis: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: RotaryLayout,
    chunks: torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:
    """As `gpu_ops.rebuild.rebuilt_chunks_in_torch`; the last dimension of every argument is contiguous."""
    batch, kv_heads, _, dim = basis.shape
    shape = batch, kv_heads, chunks.shape[2], chunk_size, dim
    out = torch.empty(shape, dtype=coefficients.dtype, device=coefficients.device)
    _launch(coefficients, basis, cos, sin, layout, chunks.contiguous(), None, out, chunk_size)
    return out


def rebuild_into(
    coefficients: torch.Tensor,
    basis: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: RotaryLayout,
    chunks: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As `gpu_ops.rebuild.rebuild_into_in_torch`; the last dimension of every argument is contiguous."""
    _launch(coefficients, basis, cos, sin, layout, chunks, slots, out, out.shape[3])


def _launch(
    coefficients: torch.Tensor, basis: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout,
    chunks: torch.Tensor, slots: torch.Tensor | None, out: torch.Tensor, chunk_size: int,
) -> None:  # fmt: skip
    batch, kv_heads, rank, dim = basis.shape
    count = chunks.shape[2]
    if count == 0:
        return
    # TF32 represents every half-precision number, so their products are exact.
    is_half = coefficients.element_size() == 2 and basis.element_size() == 2
    grid = (triton.cdiv(count * chunk_size, _TOKENS), batch * kv_heads)
    _rebuild[grid](
        coefficients, basis, cos, sin, chunks, chunks if slots is None else slots, out, count, kv_heads, out.stride(1),
        coefficients.stride(0), coefficients.stride(1), *basis.stride()[:3], cos.stride(0), sin.stride(0),
        SLOTTED=slots is not None, CHUNK=chunk_size, RANK=rank, DIM=dim, PAIRS=layout.pairs, OFFSET=layout.offset,
        INTERLEAVED=layout.interleaved, PRECISION="tf32" if is_half else "ieee", BLOCK_TOKENS=_TOKENS,
        BLOCK_RANK=_RANK, BLOCK_PAIRS=_block(layout.pairs), BLOCK_REST=_block(dim - 2 * layout.pairs),
    )  # fmt: skip


def _block(width: int) -> int:
    """The smallest width of a matrix product that covers `width`."""
    return max(16, triton.next_power_of_2(max(1, width)))
