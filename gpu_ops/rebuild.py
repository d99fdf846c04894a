"""Reconstructs keys from low-rank factors (ShadowKV, arXiv:2410.21465, algorithm 2)."""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton
from hetero_kv.gpu_ops.rotary import RotaryLayout, rotate


def rebuilt_chunks(
    coefficients: torch.Tensor,
    basis: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: RotaryLayout,
    chunks: torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:
    """Each kv head's keys of its chosen chunks, rotated to their positions.

    Args:
        coefficients: [batch, tokens, rank], of the keys of all heads before rotation.
        basis: [batch, kv_heads, rank, dim].
        cos, sin: [positions, pairs], covering at least the chunks' positions.
        layout: how a head is rotated.
        chunks: [batch, kv_heads, n] int64; chunk i is tokens i·chunk_size to (i + 1)·chunk_size - 1.

    Returns [batch, kv_heads, n, chunk_size, dim] in the dtype of `coefficients`; computed in float32.
    """
    if runs_triton(coefficients):
        from hetero_kv.gpu_ops.triton_kernels import rebuild

        with torch.cuda.device(coefficients.device):
            return rebuild.rebuilt_chunks(coefficients, basis, cos, sin, layout, chunks, chunk_size)
    return rebuilt_chunks_in_torch(coefficients, basis, cos, sin, layout, chunks, chunk_size)


def rebuilt_chunks_in_torch(
    coefficients: torch.Tensor,
    basis: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: RotaryLayout,
    chunks: torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:
    """The definition of `rebuilt_chunks`, on any device."""
    batch, _, n = chunks.shape
    positions = (chunks[..., None] * chunk_size + torch.arange(chunk_size, device=chunks.device)).flatten(2)
    row = torch.arange(batch, device=chunks.device)[:, None, None]
    plain = coefficients[row, positions].float() @ basis.float()
    keys = rotate(plain, cos[positions], sin[positions], layout)
    return keys.to(coefficients.dtype).unflatten(2, (n, chunk_size))


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
    """As `rebuild_into_in_torch`, which defines the result, by one Triton kernel on a CUDA device."""
    from hetero_kv.gpu_ops.triton_kernels import rebuild

    with torch.cuda.device(out.device):
        rebuild.rebuild_into(coefficients, basis, cos, sin, layout, chunks, slots, out)


def rebuild_into_in_torch(
    coefficients: torch.Tensor,
    basis: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: RotaryLayout,
    chunks: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the keys of chunks into slots; further arguments as for `rebuilt_chunks`.

    Args:
        chunks: as there, with -1 after the last of each head.
        slots: [batch, kv_heads, n] int64, the slot of each chunk; -1 after the last, too.
        out: [batch, kv_heads, slots, chunk_size, dim], with contiguous slots, and heads at equal distances.
    """
    inputs = coefficients, basis, cos, sin, layout, chunks.clamp(min=0), out.shape[3]
    keys = rebuilt_chunks_in_torch(*inputs)
    row, head, listed = (chunks >= 0).nonzero(as_tuple=True)
    out[row, head, slots[row, head, listed]] = keys[row, head, listed]


def rebuilt_range(
    coefficients: torch.Tensor,
    basis: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: RotaryLayout,
    start: int,
    stop: int,
) -> torch.Tensor:
    """The keys of all heads at the positions [start, stop); other arguments as above.

    Returns [batch, kv_heads, stop - start, dim] in the dtype of `coefficients`.
    """
    plain = coefficients[:, None, start:stop].float() @ basis.float()
    return rotate(plain, cos[start:stop], sin[start:stop], layout).to(coefficients.dtype)
