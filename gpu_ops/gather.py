"""Rows of a tensor in DRAM, copied to the device that computes with them."""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.kernel_choice import runs_triton


def gathered_rows(
    stored: torch.Tensor, where: torch.Tensor, like: torch.Tensor, is_mapped: bool = False
) -> torch.Tensor:
    """The rows `where` of `stored`, on the device of `like`.

    Args:
        stored: [rows, ...], contiguous, on the CPU.
        where: [n] int64, on the CPU.
        like: a tensor on the target device.
        is_mapped: whether `stored` is page-locked, at least at these rows, so that a kernel can read them.

    Returns [n, ...] in the dtype of `stored`. On CUDA the copy may be in progress on the current stream.
    """
    if not (is_mapped and runs_triton(like)):
        return gathered_rows_by_copy(stored, where, like)
    from hetero_kv.gpu_ops.triton_kernels import gather

    out = torch.empty(len(where), *stored.shape[1:], dtype=stored.dtype, device=like.device)
    with torch.cuda.device(like.device):
        gather.gathered_rows(stored, on_device(where, like.device), out)
    return out


def gathered_rows_by_copy(stored: torch.Tensor, where: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The definition of `gathered_rows`, from any memory: the CPU gathers, then copies."""
    # Copies of pageable memory to a GPU cannot overlap other work.
    picked = torch.empty(len(where), *stored.shape[1:], dtype=stored.dtype, pin_memory=like.is_cuda)
    torch.index_select(stored, 0, where, out=picked)
    return picked.to(like.device, non_blocking=True)
