"""Landmarks, outliers and the choice of chunks (ShadowKV, arXiv:2410.21465, algorithms 1 and 2)."""

from __future__ import annotations

import torch

# Chunks whose float32 keys are held at once.
TILE = 1024
# Of two vectors together, by which a product is divided: those without a length have a similarity of 0.
_LEAST_NORM = 1e-16


def landmarks(chunks: torch.Tensor) -> torch.Tensor:
    """The mean key of each chunk: [..., chunk_size, dim] -> [..., dim], in the keys' dtype."""
    return chunks.mean(dim=-2, dtype=torch.float32).to(chunks.dtype)


def least_cosines(chunks: torch.Tensor) -> torch.Tensor:
    """How badly a landmark can stand for a key of its chunk: the least cosine similarity between the two.

    Args:
        chunks: [batch, kv_heads, chunks, chunk_size, dim], keys after rotary embedding.

    Returns [batch, kv_heads, chunks] float32.
    """
    tiles = [_least_cosines(tile.float()) for tile in chunks.split(TILE, dim=2)]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=2)


def _least_cosines(keys: torch.Tensor) -> torch.Tensor:
    # torch's own takes twice as many launches, of which a decoded token is to have few.
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
    """The chunks that a kv head attends to: those whose landmarks take most of the softmax of one of its queries.

    softmax(q·landmarks) over the chunks that are no outliers, summed over query positions, maximum over the group's
    heads, the `count` best (algorithm 2).

    Args:
        q: [batch, kv_heads * group, tokens, dim].
        landmark: [batch, kv_heads, chunks, dim].
        outliers: [batch, kv_heads, n] int64, chunks that are attended to anyway; disjoint from what is chosen.
        count: chunks to choose, at most chunks - n.
        scale: factor of the scores.
        softcap: c > 0 turns a score s into c·tanh(s/c).

    Returns [batch, kv_heads, count] int64, in no particular order.
    """
    batch, heads, tokens, dim = q.shape
    kv_heads = landmark.shape[1]
    # The group's queries are just more queries of the kv head.
    # Scaled before the product, which is beyond half precision for keys that attention itself takes.
    # Rounded once: the factor is one of float32.
    folded = (q.to(landmark.dtype) * scale).reshape(batch, kv_heads, heads // kv_heads * tokens, dim)
    scores = (folded @ landmark.transpose(2, 3)).float()
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left_out = outliers[:, :, None].expand(-1, -1, scores.shape[2], -1)
    scores.scatter_(3, left_out, float("-inf"))
    shares = scores.softmax(dim=-1).unflatten(2, (heads // kv_heads, tokens)).sum(dim=3).amax(dim=2)
    # A share may underflow to 0, an outlier must not be chosen for that.
    shares.scatter_(2, outliers, -1.0)
    return shares.topk(count, dim=2, sorted=False).indices
