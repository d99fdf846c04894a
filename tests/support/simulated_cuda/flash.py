"""Fused attention with CUDA's refusals; the CPU's kernels compute the numbers."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.simulated_cuda.tensor import SimulatedTensor, on_cpu

_HALVES = (torch.float16, torch.bfloat16)


def flash_attention(
    capability: tuple[int, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0,
    causal: bool = False, _debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """`aten._scaled_dot_product_flash_attention`. Raises RuntimeError for what CUDA's kernel does not take."""
    if capability < (8, 0):
        raise RuntimeError(f"FlashAttention only supports Ampere GPUs or newer, not compute capability {capability}.")
    if q.dtype not in _HALVES or not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8:
        raise RuntimeError(f"FlashAttention takes one head dim, a multiple of 8 up to 256; got {q.shape}, {v.shape}")
    if not all(each.stride(-1) == 1 for each in (q, k, v)):
        raise RuntimeError("FlashAttention needs tensors whose last dimension is contiguous")
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise RuntimeError(f"FlashAttention needs heads of queries in groups; got {q.shape[1]} for {k.shape[1]}")
    if not k.shape[2]:
        raise RuntimeError("FlashAttention needs at least one key")
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
    return out, lse, None, None, q.shape[2], k.shape[2], None, None, None


def scaled_dot_product_attention(simulation: Any, original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` of simulated tensors."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    if not all(isinstance(each, SimulatedTensor) for each in tensors):
        raise RuntimeError("Expected query, key, value and attn_mask to be on the same device")
    index = args[0].place.index
    simulation.launch("scaled_dot_product_attention", index, tensors, [])
    args, kwargs = on_cpu(args), on_cpu(kwargs)
    out = original(*args, **kwargs)
    simulation.computed(lambda: original(*args, **kwargs), out)
    return SimulatedTensor(out, index)
