"""Entries of a bounded cache on a GPU: append a token's entry, find the lowest score, gather the other entries.

Each operation is one launch of a Triton kernel where Triton runs, and several torch operators otherwise. The small
kernels of a decoded token cost mostly their launches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton

#: Keys [batch, kv_heads, capacity, k_dim], values likewise and positions [batch, kv_heads, capacity] int64, contiguous.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def append_token(key: torch.Tensor, value: torch.Tensor, parts: Parts, taken: int, position: int) -> None:
    """As `append_token_in_torch`, which defines the result."""
    if not runs_triton(key):
        append_token_in_torch(key, value, *parts, taken, position)
        return
    from hetero_kv.gpu_ops.triton_kernels import cached_entries

    with torch.cuda.device(key.device):
        cached_entries.append_token(key, value, *parts, taken, position)


def append_token_in_torch(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor,
    taken: int, position: int,
) -> None:  # fmt: skip
    """Write a token's entry after the first `taken` entries.

    Args:
        key, value: [batch, kv_heads, 1, dim].
        keys, values, positions: as in `Parts`.
        position: position of the token in its sequence.
    """
    behind = slice(taken, taken + 1)
    keys[:, :, behind], values[:, :, behind] = key, value
    positions[:, :, behind].fill_(position)


def all_but_lowest(scores: torch.Tensor, first: int = 0, last: int = 0) -> torch.Tensor:
    """As `all_but_lowest_in_torch`, which defines the result."""
    if not (scores.dim() == 3 and runs_triton(scores)):
        return all_but_lowest_in_torch(scores, first, last)
    from hetero_kv.gpu_ops.triton_kernels import cached_entries

    with torch.cuda.device(scores.device):
        return cached_entries.all_but_lowest(scores, first, last)


def all_but_lowest_in_torch(scores: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Indices of all entries but the one with the lowest score, ascending; among equal scores the last is left out.

    Args:
        scores: [..., cached] of any dtype, floating point if entries are protected.
        first, last: numbers of entries at either end that count as infinitely high.

    Returns [..., cached - 1] int64.
    """
    cached = scores.shape[-1]
    if first or last:
        scores = protected(scores, first=first, last=last)
    dropped = cached - 1 - scores.flip(-1).argmin(dim=-1, keepdim=True)
    index = torch.arange(cached - 1, device=scores.device).expand(*scores.shape[:-1], -1)
    return index + (index >= dropped)


def protected(scores: torch.Tensor, *, first: int = 0, last: int = 0) -> torch.Tensor:
    """`scores` [..., cached] with the first and last entries set to infinity, so that they are kept."""
    scores = scores.clone()
    scores[..., :first] = float("inf")
    scores[..., scores.shape[-1] - last :] = float("inf")
    return scores


def keep(parts: Parts, scores: Sequence[torch.Tensor], index: torch.Tensor, kept: Parts) -> list[torch.Tensor]:
    """As `keep_in_torch`, which defines the result."""
    if not (index.shape[2] and runs_triton(index)):
        return keep_in_torch(parts, scores, index, kept)
    from hetero_kv.gpu_ops.triton_kernels import cached_entries

    most = cached_entries.MOST_SCORES
    with torch.cuda.device(index.device):
        found = cached_entries.keep(parts, scores[:most], index, kept)
    return [*found, *(_gathered(each, index, parts[2].shape[2]) for each in scores[most:])]


def keep_in_torch(parts: Parts, scores: Sequence[torch.Tensor], index: torch.Tensor, kept: Parts) -> list[torch.Tensor]:
    """Write the entries at `index` to the beginning of `kept`, and gather their scores.

    Args:
        parts: the entries.
        scores: [batch, kv_heads, cached or fewer] of any dtype each; entries beyond have score 0.
        index: [batch or 1, kv_heads or 1, count] int64.
        kept: capacity for at least `count` entries; memory after these is not changed.

    Returns each of the `scores` at `index`, [batch, kv_heads, count].
    """
    batch, kv_heads, capacity = parts[2].shape
    count = index.shape[2]
    index = index.expand(batch, kv_heads, count)
    # Computed once for keys and values.
    first = torch.arange(0, batch * kv_heads * capacity, capacity, device=index.device)
    rows = (index + first.view(batch, kv_heads, 1)).flatten()
    for stored, part in zip(parts[:2], kept[:2], strict=True):
        # Ten times as fast as gather, which looks up every number of a vector separately.
        found = stored.view(-1, stored.shape[3]).index_select(0, rows)
        part[:, :, :count] = found.view(batch, kv_heads, count, -1)
    kept[2][:, :, :count] = parts[2].gather(2, index)
    return [_gathered(each, index, capacity) for each in scores]


def _gathered(scores: torch.Tensor, index: torch.Tensor, capacity: int) -> torch.Tensor:
    """The scores [batch, kv_heads, cached or fewer] at `index` [batch or 1, kv_heads or 1, count]; 0 beyond them."""
    padded = torch.nn.functional.pad(scores, (0, capacity - scores.shape[2]))
    return padded.gather(2, index.expand(*scores.shape[:2], -1))
