"""Merges one evicted entry per head, after a decoded token, into the kept entry with the most similar key.

On a GPU these are two launches of Triton kernels where Triton runs (D2O, arXiv:2406.13035, section 4.2.2).
"""

from __future__ import annotations

import math

import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton


def similarities(evicted: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """As `similarities_in_torch`, which defines the result, for one evicted entry per head."""
    if not _are_served(evicted, kept):
        return similarities_in_torch(evicted, kept)
    from hetero_kv.gpu_ops.triton_kernels import merged_entries

    with torch.cuda.device(kept.device):
        return merged_entries.similarities(evicted, kept)


def similarities_in_torch(
    evicted: torch.Tensor, kept: torch.Tensor, kept_lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """The cosine similarities of evicted keys with kept ones (eq. 9).

    Args:
        evicted: [batch, kv_heads, count, k_dim].
        kept: [batch, kv_heads, cached, k_dim].
        kept_lengths: `lengths` of the kept keys; computed if None.

    Returns [batch, kv_heads, count, cached] float32.
    """
    evicted, kept = evicted.float(), kept.float()
    kept_lengths = lengths(kept) if kept_lengths is None else kept_lengths
    return (evicted @ kept.transpose(-1, -2)) / (lengths(evicted) * kept_lengths.transpose(-1, -2))


def merge_one(
    keys: torch.Tensor, values: torch.Tensor, evicted_keys: torch.Tensor, evicted_values: torch.Tensor,
    similarities: torch.Tensor, matches: torch.Tensor, joins: torch.Tensor,
) -> None:  # fmt: skip
    """As `merge_one_in_torch`, which defines the result."""
    vectors = keys, values, evicted_keys, evicted_values
    if not _are_served(*vectors):
        merge_one_in_torch(*vectors, similarities, matches, joins)
        return
    from hetero_kv.gpu_ops.triton_kernels import merged_entries

    with torch.cuda.device(keys.device):
        merged_entries.merge_one(*vectors, similarities, matches, joins)


def merge_one_in_torch(
    keys: torch.Tensor, values: torch.Tensor, evicted_keys: torch.Tensor, evicted_values: torch.Tensor,
    similarities: torch.Tensor, matches: torch.Tensor, joins: torch.Tensor,
) -> None:  # fmt: skip
    """Write the merge of each joining evicted entry with the kept entry that it matches to `keys` and `values`.

    Args:
        keys, values: [batch, kv_heads, cached, dim], of the kept entries.
        evicted_keys, evicted_values: [batch, kv_heads, 1, dim].
        similarities: [batch, kv_heads, 1] float32.
        matches: [batch, kv_heads, 1] int64, indices of kept entries.
        joins: [batch, kv_heads, 1] bool.
    """
    weight = weights(similarities, joins)[..., None]
    for part, new in ((keys, evicted_keys), (values, evicted_values)):
        index = matches[..., None].expand(-1, -1, -1, part.shape[3])
        part.scatter_(2, index, blended(part.gather(2, index), weight * new, weight))


def weights(similarities: torch.Tensor, joins: torch.Tensor) -> torch.Tensor:
    """The weight of an evicted entry: exp(similarity) if it joins, relative to e = exp(1) of the kept one; else 0."""
    return similarities.exp().masked_fill(~joins, 0.0)


def blended(old: torch.Tensor, joined: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Blend `old` with `joined`, the weighted sum of the joining vectors, whose weights sum to `total`, in old's dtype.

    Vectors that nothing joins stay bit-identical.
    """
    blended = (math.e * old.float() + joined) / (math.e + total)
    return torch.where(total > 0, blended.to(old.dtype), old)


def lengths(keys: torch.Tensor) -> torch.Tensor:
    """Norms of vectors [..., dim] float32: [..., 1], above 0."""
    return keys.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def _are_served(*vectors: torch.Tensor) -> bool:
    return runs_triton(vectors[0]) and all(each.stride(-1) == 1 for each in vectors)
