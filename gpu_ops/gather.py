"""Rows of a tensor in DRAM, on the device that computes with them."""

from __future__ import annotations

import torch

from gpu_ops.host_copies import on_device
from gpu_ops.kernel_choice import runs_triton


def gathered_rows(
    stored: torch.Tensor, where: torch.Tensor, like: torch.Tensor, is_mapped: bool = False
) -> torch.Tensor:
    """The rows `where` of `stored`, on the device of `like`.

    Args:
        stored: [rows, ...], contiguous, on the CPU.
        where: [n] int64, on the CPU.
        like: a tensor on the device that the rows are wanted on.
        is_mapped: whether `stored` is page-locked, at least where the rows are, so that a kernel can read them.

    Returns [n, ...] in the dtype of `stored`; on CUDA it may still be on its way, as far as the stream is concerned.
    """
    if not (is_mapped and runs_triton(like)):
        return gathered_rows_by_copy(stored, where, like)
    from gpu_ops.triton_kernels import gather

    out = torch.empty(len(where), *stored.shape[1:], dtype=stored.dtype, device=like.device)
    with torch.cuda.device(like.device):
        gather.gathered_rows(stored, on_device(where, like.device), out)
    return out


def gathered_rows_by_copy(stored: torch.Tensor, where: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """As `gathered_rows`, from any memory: gathered by the CPU, then copied. It defines the result."""
    # Pageable memory cannot be copied to a GPU beside other work.
    picked = torch.empty(len(where), *stored.shape[1:], dtype=stored.dtype, pin_memory=like.is_cuda)
    torch.index_select(stored, 0, where, out=picked)
    return picked.to(like.device, non_blocking=True)
