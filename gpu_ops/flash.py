"""Attention of a prompt in one pass of a Triton kernel."""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.merge import apply_sink
from hetero_kv.gpu_ops.tiled_attention import tiled_attention


def flash_attention(
    q: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of queries to earlier keys in two tensors, on CUDA.

    Args:
        q: [batch, kv_heads * group, n, k_dim], at positions past, ..., past + n - 1.
        past_k, past_v: [batch, kv_heads, past, dim], at the positions before; past may be 0.
        k, v: [batch, kv_heads, own, dim], at positions from past on; own is n, or 0.
        scale, softcap: as in `tiled_attention`.
        window: number of keys that a query sees, itself included; None for all earlier keys.
        sink: [kv_heads * group], scores of learned sinks (`gpu_ops.merge.apply_sink`).

    Returns (out [batch, kv_heads * group, n, v_dim] in q's dtype, lse [batch, kv_heads * group, n] float32, which
    includes the sink); 0 and -inf for a query that sees nothing.
    """
    from hetero_kv.gpu_ops.triton_kernels import flash

    with torch.cuda.device(q.device):
        return flash.flash_attention(q, past_k, past_v, k, v, scale, softcap, window, sink)


def flash_attention_in_torch(
    q: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `flash_attention`, on any device, for queries that each see a key."""
    group = q.shape[1] // k.shape[1]
    keys, values = (torch.cat(parts, dim=2).repeat_interleave(group, dim=1) for parts in ((past_k, k), (past_v, v)))
    position = torch.arange(past_k.shape[2], past_k.shape[2] + q.shape[2], device=q.device)[:, None]
    place = torch.arange(keys.shape[2], device=q.device)[None, :]
    mask = place <= position
    if window is not None:
        mask = mask & (position - place < window)
    out, lse = tiled_attention(q, keys, values, scale, softcap, mask)
    return (out, lse) if sink is None else apply_sink(out, lse, sink)
