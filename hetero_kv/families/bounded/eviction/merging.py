"""Merges evicted entries into kept ones by key similarity (D2O, arXiv:2406.13035, section 4.2.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetero_kv.families.bounded.entries import Entries
from hetero_kv.gpu_ops import merged_entries

# Pairs of an evicted and a kept entry, over all heads, per tile.
_PAIRS_AT_ONCE = 1 << 24


def nearest(evicted: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept key that is most similar to each evicted one, by cosine (eq. 9).

    Args:
        evicted: [batch, kv_heads, count, k_dim].
        kept: [batch, kv_heads, cached, k_dim].

    Returns (similarities [batch, kv_heads, count] float32, indices among the kept keys, of the same shape, int64).
    """
    if evicted.shape[2] == 1:
        best = merged_entries.similarities(evicted, kept).max(dim=-1)
        return best.values, best.indices
    kept = kept.float()
    lengths = merged_entries.lengths(kept)
    found = [
        merged_entries.similarities_in_torch(evicted[:, :, tile], kept, lengths).max(dim=-1)
        for tile in _tiles(evicted, kept.shape[2])
    ]
    similarities, matches = zip(*found, strict=True)
    return torch.cat(similarities, dim=-1), torch.cat(matches, dim=-1)


def merged(
    kept: Entries, evicted: Entries, similarities: torch.Tensor, matches: torch.Tensor, joins: torch.Tensor
) -> Entries:
    """Returns `kept` with the joining evicted entries merged in, keys and values alike (eq. 11 and 12).

    The kept entry has weight e = exp(1), the weight of similarity 1, each joining one exp(similarity). The sum is
    divided by the sum of these weights. (Eq. 12 as printed gives each joining entry the sum of all, so that weights
    would sum to more than 1.) Entries that nothing joins stay bit-identical.

    Args:
        kept: in memory without other references, such as the result of `Entries.kept`; a single merge writes to it.
        similarities, matches: results of `nearest`, [batch, kv_heads, count].
        joins: [batch, kv_heads, count] bool.
    """
    if evicted.num_entries == 1:
        merged_entries.merge_one(*_parts(kept), *_parts(evicted), similarities, matches, joins)
        return kept
    weights = merged_entries.weights(similarities, joins)
    shape = kept.positions.shape
    total = torch.zeros(shape, dtype=torch.float32, device=weights.device)
    keys, values = (torch.zeros(part.shape, dtype=torch.float32, device=part.device) for part in _parts(kept))
    for tile in _tiles(evicted.keys, kept.num_entries):
        # A matrix product instead of a scattered addition, whose order, and thus rounding, is undefined on a GPU.
        spread = weights.new_zeros(*matches[:, :, tile].shape, kept.num_entries)
        spread.scatter_(-1, matches[:, :, tile, None], weights[:, :, tile, None])
        total += spread.sum(dim=2)
        for target, part in zip((keys, values), _parts(evicted), strict=True):
            target += spread.transpose(-1, -2) @ part[:, :, tile].float()
    keys, values = (
        merged_entries.blended(old, joined, total[..., None])
        for old, joined in zip(_parts(kept), (keys, values), strict=True)
    )
    return kept.with_vectors(keys, values)


def _parts(entries: Entries) -> tuple[torch.Tensor, torch.Tensor]:
    return entries.keys, entries.values


def _tiles(evicted: torch.Tensor, cached: int) -> Iterator[slice]:
    batch, kv_heads, count, _ = evicted.shape
    step = max(1, _PAIRS_AT_ONCE // (batch * kv_heads * cached))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
