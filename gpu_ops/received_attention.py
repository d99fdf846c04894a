"""How much attention each key receives from the queries of an observation window."""

from __future__ import annotations

import torch

_TILE = 512


def received_attention(
    q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, scale: float, softcap: float | None = None
) -> torch.Tensor:
    """The attention that every key receives, summed over the queries and over the heads of a group.

    The queries are the last of the sequence; with the log-sum-exp of their whole rows known, the keys are taken a tile
    at a time, and nothing of size queries × sequence is ever held.

    Args:
        q: [batch, kv_heads * group, n, k_dim], the queries of the last n positions; those before the keys see none.
        lse: [batch, kv_heads * group, n] float32, of each query over all keys that it sees.
        keys: [batch, kv_heads, length, k_dim], of the whole sequence.
        scale: factor of the scores.
        softcap: c > 0 turns a score s into c·tanh(s/c).

    Returns [batch, kv_heads, length] float32.
    """
    batch, heads, n, k_dim = q.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    folded = q.reshape(batch, kv_heads, group * n, k_dim).float() * scale
    normaliser = lse.reshape(batch, kv_heads, group * n, 1).float()
    positions = torch.arange(length - n, length, device=q.device).repeat(group)[:, None]
    received = torch.empty(batch, kv_heads, length, dtype=torch.float32, device=q.device)
    for start in range(0, length, _TILE):
        tile = slice(start, min(start + _TILE, length))
        scores = folded @ keys[:, :, tile].float().transpose(-1, -2)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        probabilities = torch.exp(scores - normaliser)
        if tile.stop > length - n:
            seen = torch.arange(tile.start, tile.stop, device=q.device)[None, :] <= positions
            probabilities.masked_fill_(~seen, 0.0)
        received[:, :, tile] = probabilities.sum(dim=2)
    return received
