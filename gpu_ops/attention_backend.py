"""Chooses the kernel for dense attention on a GPU: torch's, the package flash-attn's, Triton's, or torch in tiles."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

import torch

from hetero_kv.gpu_ops import window_step
from hetero_kv.gpu_ops.kernel_choice import runs_triton

#: The values of the setting, with their descriptions.
BACKENDS = {
    "auto": "torch's flash kernel where it supports the call, else flash-attn, else Triton, else torch by tiles; "
    "Triton for decoded tokens with blocks in DRAM",
    "flash_attn": "the package flash-attn where it supports the call (half precision, Ampere and later); else as auto",
    "triton": "the project's Triton kernel, where Triton runs",
    "torch": "torch alone: its flash kernel, or tiles in float32",
}
_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256


class AttentionKernel(Enum):
    """A kernel that computes dense attention with its log-sum-exp."""

    ATEN = "torch's flash kernel"
    FLASH_ATTN = "flash-attn"
    TRITON = "Triton"
    TILES = "torch, tiles in float32"


class AttentionBackend:
    """The attention kernels that a user allows on a GPU, and those used so far.

    Args:
        name: one of `BACKENDS`.

    Attributes:
        used: kernels chosen so far.
    """

    def __init__(self, name: str = "auto") -> None:
        self.name = name
        self.used: set[AttentionKernel] = set()


_DEFAULT = AttentionBackend()
_present: ContextVar[AttentionBackend] = ContextVar("attention_backend")


@contextmanager
def attending_by(backend: AttentionBackend) -> Iterator[None]:
    """A context in which `backend` determines the attention kernels on a GPU."""
    token = _present.set(backend)
    try:
        yield
    finally:
        _present.reset(token)


def missing(backend: str) -> str | None:
    """The reason why a backend is not available, and the remedy; None if it is available."""
    if backend == "flash_attn" and not has_flash_attn():
        return (
            "the package flash-attn (2.6 or later) is not installed, or was built for another torch: pip install "
            "--no-build-isolation 'hetero-kv[flash-attn]', or set it to auto"
        )
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'hetero-kv[gpu]', or set it to auto"
    return None


def kernel_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_plain: bool) -> AttentionKernel:
    """The kernel for tensors [..., dim] on CUDA; `is_plain`: no soft-capping, and no window that hides a key."""
    backend = _present.get(_DEFAULT)
    kernel = _kernel_for(backend.name, q, k, v, is_plain)
    backend.used.add(kernel)
    return kernel


def takes_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `gpu_ops.window_step` supports a decoded token's query, key and value [batch, heads, 1, dim]."""
    backend = _present.get(_DEFAULT)
    if backend.name not in ("auto", "triton") or not window_step.supports(q, k, v):
        return False
    backend.used.add(AttentionKernel.TRITON)
    return True


def obstacle_to_sets(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why `gpu_ops.set_attention` does not support a chunk's queries, keys and values; None if it does."""
    backend = _present.get(_DEFAULT)
    if backend.name == "torch":
        return "attention_backend is torch, and its kernels are Triton's"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, *_HALVES):
        return f"its kernels take queries, keys and values of one float type, not {q.dtype}, {k.dtype} and {v.dtype}"
    if max(q.shape[-1], v.shape[-1]) > _LARGEST_HEAD:
        return f"its kernels take heads of at most {_LARGEST_HEAD} numbers, not {max(q.shape[-1], v.shape[-1])}"
    if not runs_triton(q):
        return "Triton does not run there"
    backend.used.add(AttentionKernel.TRITON)
    return None


def _kernel_for(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_plain: bool) -> AttentionKernel:
    dim = max(q.shape[-1], v.shape[-1])
    is_alike = q.dtype == k.dtype == v.dtype and dim <= _LARGEST_HEAD
    is_half = is_alike and q.dtype in _HALVES and torch.cuda.get_device_capability(q.device) >= (8, 0)
    if backend == "flash_attn" and is_half and has_flash_attn():
        return AttentionKernel.FLASH_ATTN
    if backend != "triton" and is_half and is_plain:
        return AttentionKernel.ATEN
    if backend == "auto" and is_half and has_flash_attn():
        return AttentionKernel.FLASH_ATTN
    if backend != "torch" and is_alike and q.dtype in (torch.float32, *_HALVES) and runs_triton(q):
        return AttentionKernel.TRITON
    return AttentionKernel.ATEN if is_half and is_plain else AttentionKernel.TILES


@functools.cache
def has_flash_attn() -> bool:
    """Whether the package flash-attn is installed, in a version with soft-capping (2.6)."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    import inspect

    try:
        from flash_attn import flash_attn_func
    # It is compiled against one version of torch and cannot be loaded with another.
    except (ImportError, OSError):
        return False
    return "softcap" in inspect.signature(flash_attn_func).parameters
