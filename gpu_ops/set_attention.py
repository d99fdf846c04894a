"""Sparse causal attention of a prompt's chunk on a GPU: each query block attends to its own set of keys."""

from __future__ import annotations

import torch

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.gpu_ops.key_sets import KeySets
from hetero_kv.gpu_ops.merge import apply_sink


def set_attention(
    q: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sets: KeySets,
    scale: float,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Causal attention to the keys in `sets`, by one launch of a Triton kernel, on CUDA.

    Args:
        q: [batch, kv_heads * group, n, k_dim], at positions sets.first, ..., sets.first + n - 1.
        past_k, past_v: [batch, kv_heads, past, dim], the first keys and values; past may be 0.
        k, v: [batch, kv_heads, own, dim], those at positions from past on.
        scale, softcap: as in `tiled_attention`.
        sink: [kv_heads * group], scores of learned sinks (`gpu_ops.merge.apply_sink`).

    Returns (out [batch, kv_heads * group, n, v_dim] in q's dtype, lse [batch, kv_heads * group, n] float32, which
    includes the sink, attended [batch, kv_heads * group, query blocks] int32: the number of keys that a query block
    attends to).
    """
    from hetero_kv.gpu_ops.triton_kernels import set_attention as kernel

    with torch.cuda.device(q.device):
        return kernel.set_attention(q, past_k, past_v, k, v, sets, scale, softcap, sink)


def set_attention_in_torch(
    q: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sets: KeySets,
    scale: float,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition of `set_attention`, on any device; at least float32 throughout."""
    group, n = q.shape[1] // k.shape[1], q.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = (
        torch.cat(parts, dim=2)[:, :, : sets.first + n].to(dtype).repeat_interleave(group, dim=1)
        for parts in ((past_k, k), (past_v, v))
    )
    seen = sets.seen()[..., : sets.first + n]
    place = torch.arange(sets.first + n, device=q.device)
    causal = place <= sets.first + torch.arange(n, device=q.device)[:, None]
    scores = q.to(dtype) @ keys.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    mask = seen.repeat_interleave(QUERY_BLOCK, dim=2)[:, :, :n] & causal
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    out = torch.exp(scores - lse[..., None]) @ values
    attended = out.to(q.dtype), lse.float()
    attended = attended if sink is None else apply_sink(*attended, sink)
    return *attended, seen.sum(dim=-1, dtype=torch.int32)
