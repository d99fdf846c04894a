"""Landmarks, outliers and the choice of chunks (ShadowKV, arXiv:2410.21465, algorithms 1 and 2)."""

from __future__ import annotations

import torch

# Chunks per tile of float32 keys.
TILE = 1024
# Lower bound of the product of two norms, a divisor: vectors of length 0 have similarity 0.
_LEAST_NORM = 1e-16


def landmarks(chunks: torch.Tensor) -> torch.Tensor:
    """The mean key of each chunk: [..., chunk_size, dim] -> [..., dim], in the keys' dtype."""
    return chunks.mean(dim=-2, dtype=torch.float32).to(chunks.dtype)


def least_cosines(chunks: torch.Tensor) -> torch.Tensor:
    """The least cosine similarity between a chunk's landmark and its keys: how badly the landmark represents them.

    Args:
        chunks: [batch, kv_heads, chunks, chunk_size, dim], keys after rotary embedding.

    Returns [batch, kv_heads, chunks] float32.
    """
    tiles = [_least_cosines(tile.float()) for tile in chunks.split(TILE, dim=2)]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=2)


def _least_cosines(keys: torch.Tensor) -> torch.Tensor:
    # torch's own function takes twice as many launches, and a decoded token should need few.
    mean = keys.mean(dim=-2, keepdim=True)
    norms = torch.linalg.vector_norm(keys, dim=-1) * torch.linalg.vector_norm(mean, dim=-1)
    return ((keys * mean).sum(dim=-1) / norms.clamp(min=_LEAST_NORM)).amin(dim=-1)


def chosen_chunks(
    q: torch.Tensor,
    landmark: torch.Tensor,
    outliers: torch.Tensor,
    count: int,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """The chunks that a kv head attends to: those with the largest landmark attention of any of its queries.

    Attention is softmax(q·landmarks) over the chunks that are no outliers, summed over query positions, maximum over
    the group's heads; the `count` best chunks are taken (algorithm 2).

    Args:
        q: [batch, kv_heads * group, tokens, dim].
        landmark: [batch, kv_heads, chunks, dim].
        outliers: [batch, kv_heads, n] int64, chunks that are attended to anyway and are never chosen.
        count: chunks to choose, at most chunks - n.
        scale: factor of the scores.
        softcap: c > 0 turns a score s into c·tanh(s/c).

    Returns [batch, kv_heads, count] int64, ascending.
    """
    batch, heads, tokens, dim = q.shape
    kv_heads = landmark.shape[1]
    # The group's queries are more queries of the same kv head.
    # Queries are scaled before the product, which could exceed half precision.
    # The factor is a float32, so they are rounded once.
    folded = (q.to(landmark.dtype) * scale).reshape(batch, kv_heads, heads // kv_heads * tokens, dim)
    scores = (folded @ landmark.transpose(2, 3)).float()
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left_out = outliers[:, :, None].expand(-1, -1, scores.shape[2], -1)
    scores.scatter_(3, left_out, float("-inf"))
    shares = scores.softmax(dim=-1).unflatten(2, (heads // kv_heads, tokens)).sum(dim=3).amax(dim=2)
    # A share may underflow to 0; outliers must rank below it.
    shares.scatter_(2, outliers, -1.0)
    return shares.topk(count, dim=2, sorted=False).indices.sort(dim=2).values
