"""Whether a Triton kernel replaces the torch operators that define its result."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels process `tensor`: it is on a CUDA device, and Triton is installed and runs there."""
    return tensor.is_cuda and _runs_on(tensor.device)


@functools.cache
def _runs_on(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from hetero_kv.gpu_ops.triton_kernels.merge import merge_attention

    parts = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, 1, 1, device=device)
    try:
        with torch.cuda.device(device):
            merge_attention(*parts, *parts)
    # Whatever Triton lacks (a C compiler, a supported driver), torch does the same work.
    except Exception as error:
        # A temporary lack of memory says nothing about Triton.
        if isinstance(error, MemoryError) or "out of memory" in str(error):
            raise
        warnings.warn(
            f"Triton is installed but cannot run on {device} ({type(error).__name__}: {error}); torch computes "
            "instead, in several passes. Triton needs a C compiler and a supported GPU",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True
