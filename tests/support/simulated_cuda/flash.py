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


def packed_flash_attention(
    capability: tuple[int, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_queries: torch.Tensor,
    first_keys: torch.Tensor, longest_q: int, longest_k: int, dropout: float, causal: bool, _debug: bool, *,
    scale: float | None = None, seqused_k: torch.Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """`aten._flash_attention_forward` of packed sequences, of which each attends to its first `seqused_k` keys.

    q, k and v are [tokens, heads, dim], and `first_queries` and `first_keys` where each sequence begins.
    """
    for name, numbers in (("cum_seq_q", first_queries), ("cum_seq_k", first_keys), ("seqused_k", seqused_k)):
        if numbers.dtype is not torch.int32:
            raise RuntimeError(f"{name} must have dtype int32, got {numbers.dtype}")
    outs, lses = [], []
    for row, (start, used) in enumerate(zip(first_keys[:-1].tolist(), seqused_k.tolist(), strict=True)):
        if not used <= longest_k or start + used > len(k):
            raise RuntimeError(f"row {row} has {used} keys from {start} on, of {len(k)} and at most {longest_k}")
        own = q[first_queries[row] : first_queries[row + 1]], k[start : start + used], v[start : start + used]
        heads_first = [each.transpose(0, 1)[None] for each in own]
        out, lse, *_ = flash_attention(capability, *heads_first, dropout, causal, scale=scale)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1), None, None, None


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
