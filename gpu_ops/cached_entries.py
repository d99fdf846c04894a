"""Entries of a bounded cache on a GPU: a token's are written, the lowest is found, and the others are gathered.

Each is one launch of a Triton kernel where Triton runs, and some torch operators where it does not: of a token's small
kernels the launches are what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_ops.kernel_choice import runs_triton

#: Keys [batch, kv_heads, capacity, k_dim], values likewise and positions [batch, kv_heads, capacity] int64, contiguous.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def append_token(key: torch.Tensor, value: torch.Tensor, parts: Parts, taken: int, position: int) -> None:
    """As `append_token_in_torch`, which defines the result."""
    if not runs_triton(key):
        append_token_in_torch(key, value, *parts, taken, position)
        return
    from gpu_ops.triton_kernels import cached_entries

    with torch.cuda.device(key.device):
        cached_entries.append_token(key, value, *parts, taken, position)


def append_token_in_torch(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor,
    taken: int, position: int,
) -> None:  # fmt: skip
    """Write a token behind the entries that are `taken`.

    Args:
        key, value: [batch, kv_heads, 1, dim].
        keys, values, positions: as in `Parts`.
        position: of the token in its sequence.
    """
    behind = slice(taken, taken + 1)
    keys[:, :, behind], values[:, :, behind] = key, value
    positions[:, :, behind].fill_(position)


def all_but_lowest(scores: torch.Tensor, first: int = 0, last: int = 0) -> torch.Tensor:
    """As `all_but_lowest_in_torch`, which defines the result."""
    if not (scores.dim() == 3 and runs_triton(scores)):
        return all_but_lowest_in_torch(scores, first, last)
    from gpu_ops.triton_kernels import cached_entries

    with torch.cuda.device(scores.device):
        return cached_entries.all_but_lowest(scores, first, last)


def all_but_lowest_in_torch(scores: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Indices of all entries but the one with the lowest score, ascending; of equal ones the last is left out.

    Args:
        scores: [..., cached] of any type, floating point where entries are protected.
        first, last: entries at either end that count as infinitely high.

    Returns [..., cached - 1] int64.
    """
    cached = scores.shape[-1]
    if first or last:
        scores = protected(scores, first=first, last=last)
    dropped = cached - 1 - scores.flip(-1).argmin(dim=-1, keepdim=True)
    index = torch.arange(cached - 1, device=scores.device).expand(*scores.shape[:-1], -1)
    return index + (index >= dropped)


def protected(scores: torch.Tensor, *, first: int = 0, last: int = 0) -> torch.Tensor:
    """`scores` [..., cached] with the first and the last entries at infinity, so that they are kept."""
    scores = scores.clone()
    scores[..., :first] = float("inf")
    scores[..., scores.shape[-1] - last :] = float("inf")
    return scores


def keep(parts: Parts, scores: Sequence[torch.Tensor], index: torch.Tensor, kept: Parts) -> list[torch.Tensor]:
    """As `keep_in_torch`, which defines the result."""
    if not (index.shape[2] and runs_triton(index)):
        return keep_in_torch(parts, scores, index, kept)
    from gpu_ops.triton_kernels import cached_entries

    most = cached_entries.MOST_SCORES
    with torch.cuda.device(index.device):
        found = cached_entries.keep(parts, scores[:most], index, kept)
    return [*found, *(_gathered(each, index, parts[2].shape[2]) for each in scores[most:])]


def keep_in_torch(parts: Parts, scores: Sequence[torch.Tensor], index: torch.Tensor, kept: Parts) -> list[torch.Tensor]:
    """Write the entries at `index` to the beginning of `kept`, and gather their scores.

    Args:
        parts: the entries.
        scores: [batch, kv_heads, cached or fewer] of any type each; entries behind have 0.
        index: [batch or 1, kv_heads or 1, count] int64.
        kept: room for `count` entries at least; what lies behind these stays as it is.

    Returns of each of the `scores` those of the entries at `index`, [batch, kv_heads, count].
    """
    batch, kv_heads, capacity = parts[2].shape
    count = index.shape[2]
    index = index.expand(batch, kv_heads, count)
    # Once for keys and values.
    first = torch.arange(0, batch * kv_heads * capacity, capacity, device=index.device)
    rows = (index + first.view(batch, kv_heads, 1)).flatten()
    for stored, part in zip(parts[:2], kept[:2], strict=True):
        # Ten times as fast as gather, which looks up every number of a vector by itself.
        found = stored.view(-1, stored.shape[3]).index_select(0, rows)
        part[:, :, :count] = found.view(batch, kv_heads, count, -1)
    kept[2][:, :, :count] = parts[2].gather(2, index)
    return [_gathered(each, index, capacity) for each in scores]


def _gathered(scores: torch.Tensor, index: torch.Tensor, capacity: int) -> torch.Tensor:
    """Of [batch, kv_heads, cached or fewer] those at `index` [batch or 1, kv_heads or 1, count]; 0 for those behind."""
    padded = torch.nn.functional.pad(scores, (0, capacity - scores.shape[2]))
    return padded.gather(2, index.expand(*scores.shape[:2], -1))
