"""Selects entries by their scores."""

from __future__ import annotations

import torch

from hetero_kv.cpu_ops.cached_entries import all_but_lowest
from hetero_kv.gpu_ops import cached_entries
from hetero_kv.gpu_ops.cached_entries import protected


def best(scores: torch.Tensor, count: int, *, first: int = 0, last: int = 0) -> torch.Tensor:
    """Indices of the `count` highest scores along the last dimension, ascending; among equal scores the earlier wins.

    Args:
        scores: [..., cached], floating point if entries are protected.
        first, last: numbers of entries at either end that count as infinitely high.

    Returns [..., count] int64.
    """
    # A decode step drops one entry: the last of the lowest, so that the earlier of equals stays.
    is_step, has_kernel = scores.shape[-1] - count == 1, scores.device.type == "cpu" and scores.dim() == 3
    if is_step and not has_kernel:
        return cached_entries.all_but_lowest(scores, first, last)
    if first or last:
        scores = protected(scores, first=first, last=last)
    if is_step:
        return torch.from_numpy(all_but_lowest(scores.numpy()))
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return order.sort(dim=-1).values


def others(index: torch.Tensor, cached: int) -> torch.Tensor:
    """The indices below `cached` that are not in `index` [batch, kv_heads, count], ascending."""
    batch, kv_heads, count = index.shape
    if cached - count == 1:
        # A decode step: the sum of all indices minus the sum of these.
        return cached * (cached - 1) // 2 - index.sum(dim=-1, keepdim=True)
    # Sorting, because selecting by a mask would have a GPU report the count to the host.
    gone = torch.ones(batch, kv_heads, cached, dtype=torch.uint8, device=index.device).scatter(-1, index, 0)
    return gone.argsort(dim=-1, descending=True, stable=True)[..., : cached - count]


def seen_by(like: torch.Tensor, tokens: int, group: int = 1) -> torch.Tensor:
    """How many queries of the newest `tokens` see each entry, times `group`: [batch, kv_heads, cached] float32.

    like: a score of all entries.
    """
    if tokens == 1:
        return torch.full_like(like, group)
    cached = like.shape[2]
    seen = torch.arange(cached, 0, -1, device=like.device).clamp(max=tokens) * group
    return torch.empty_like(like).copy_(seen)
