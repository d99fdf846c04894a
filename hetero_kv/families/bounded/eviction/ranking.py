"""Picking entries by their scores."""

from __future__ import annotations

import torch

from cpu_ops.cached_entries import all_but_lowest


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest scores along the last dimension, ascending; of equal scores the earlier wins.

    Args:
        scores: [..., cached].

    Returns [..., count] int64.
    """
    cached = scores.shape[-1]
    if cached - count == 1:
        # One step of decoding. The last of the lowest goes, so that the earlier of equals stays.
        if scores.device.type == "cpu" and scores.dim() == 3:
            return torch.from_numpy(all_but_lowest(scores.numpy()))
        dropped = cached - 1 - scores.flip(-1).argmin(dim=-1, keepdim=True)
        index = torch.arange(count, device=scores.device).expand(*scores.shape[:-1], count)
        return index + (index >= dropped)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return order.sort(dim=-1).values


def protected(scores: torch.Tensor, *, first: int = 0, last: int = 0) -> torch.Tensor:
    """`scores` [..., cached] with the first and the last entries at infinity, so that they are kept."""
    scores = scores.clone()
    scores[..., :first] = float("inf")
    scores[..., scores.shape[-1] - last :] = float("inf")
    return scores


def others(index: torch.Tensor, cached: int) -> torch.Tensor:
    """The indices 0 to `cached` that are not in `index` [batch, kv_heads, count], ascending."""
    batch, kv_heads, count = index.shape
    if cached - count == 1:
        # One step of decoding: what all indices add up to, without these.
        return cached * (cached - 1) // 2 - index.sum(dim=-1, keepdim=True)
    # Sorted and not picked by a mask, of which a GPU would have to tell the host how many it picks.
    gone = torch.ones(batch, kv_heads, cached, dtype=torch.uint8, device=index.device).scatter(-1, index, 0)
    return gone.argsort(dim=-1, descending=True, stable=True)[..., : cached - count]
