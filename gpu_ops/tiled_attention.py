"""Dense attention in plain torch, the definition of all its kernels."""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.merge import merge_attention

QUERY_TILE = 256
KEY_TILE = 4096


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float32, in tiles of queries and keys.

    Args:
        q: [batch, heads, n, k_dim].
        k: [batch, heads, m, k_dim].
        v: [batch, heads, m, v_dim].
        scale: factor of the scores before softcap and softmax.
        softcap: c > 0 turns a score s into c·tanh(s/c) (Gemma 2).
        mask: [n, m] bool, True where a query sees a key; every query sees at least one.
        causal: query i sees keys 0..i (n equals m).

    Returns (out [batch, heads, n, v_dim] in q's dtype, lse [batch, heads, n] float32).
    """
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for start in range(0, q.shape[2], QUERY_TILE):
        rows = slice(start, min(start + QUERY_TILE, q.shape[2]))
        out[:, :, rows], lse[:, :, rows] = _tile_of_queries(q[:, :, rows], k, v, rows, scale, softcap, mask, causal)
    return out, lse


def _tile_of_queries(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: slice,
    scale: float,
    softcap: float | None,
    mask: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tiled_attention` for the queries at `rows`, in tiles of keys."""
    scaled = q.float() * scale
    out = torch.zeros(*q.shape[:3], v.shape[-1], device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
    length = rows.stop if causal else k.shape[2]
    for start in range(0, length, KEY_TILE):
        columns = slice(start, min(start + KEY_TILE, length))
        scores = scaled @ k[:, :, columns].float().transpose(-1, -2)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            positions = torch.arange(columns.start, columns.stop, device=q.device)
            queries = torch.arange(rows.start, rows.stop, device=q.device)
            scores.masked_fill_(positions[None, :] > queries[:, None], float("-inf"))
        if mask is not None:
            scores.masked_fill_(~mask[rows, columns], float("-inf"))
        part_lse = torch.logsumexp(scores, dim=-1)
        base = part_lse.masked_fill(torch.isneginf(part_lse), 0.0)
        part = torch.exp(scores - base[..., None]) @ v[:, :, columns].float()
        out, lse = merge_attention(out, lse, part, part_lse)
    return out.to(q.dtype), lse
