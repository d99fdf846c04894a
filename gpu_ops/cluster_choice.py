"""Chooses clusters of keys on a GPU, and lists the tokens of the best ones, without the host.

RetroInfer (Chen et al. 2025, arXiv:2505.02922), section 4.2: the tokens of the best clusters are attended to, and the
next clusters are estimated. How many of both there are follows from the number of all clusters, which is a number on
the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hetero_kv.gpu_ops.row_memory import Memory, by_row


class ClusterBudget(NamedTuple):
    """How many clusters of a Context are attended to and estimated: whole numbers, or shares of all up to 1.0.

    Attributes:
        exact: clusters whose tokens are attended to, at least one.
        estimated: clusters after these; 0 for none.
    """

    exact: int | float
    estimated: int | float

    def numbers(self, total: int) -> tuple[int, int]:
        """How many of `total` clusters are attended to, and how many are estimated."""
        exact = _part_of(self.exact, total)
        return exact, min(_part_of(self.estimated, total), total - exact) if self.estimated else 0


class ChosenClusters(NamedTuple):
    """The clusters of each kv head.

    Attributes:
        is_exact: [batch, kv_heads, clusters] int8, 1 for a cluster whose tokens are attended to, 0 for others;
            undefined behind the last cluster.
        estimated: [batch, kv_heads, n] int32, those that are estimated, ascending; undefined behind the last one.
        counts: [batch, kv_heads] int32, how many are estimated.
    """

    is_exact: torch.Tensor
    estimated: torch.Tensor
    counts: torch.Tensor


class ListedTokens(NamedTuple):
    """The tokens of each kv head's clusters, ascending, as numbers in the Context.

    Attributes:
        chosen: [batch, kv_heads, slots] int32, the first ones; undefined behind the last one.
        counts: [batch, kv_heads] int32, how many these are.
        beyond: [batch, kv_heads, n] int32, those for which there are no slots, likewise.
        beyond_counts: [batch, kv_heads] int32, how many these are.
    """

    chosen: torch.Tensor
    counts: torch.Tensor
    beyond: torch.Tensor
    beyond_counts: torch.Tensor


def score_clusters(
    q: torch.Tensor, keys: Memory, sizes: Memory, number: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """As `score_clusters_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import cluster_choice

    with torch.cuda.device(q.device):
        return cluster_choice.score(q, keys, sizes, number, scale, softcap)


def score_clusters_in_torch(
    q: torch.Tensor, keys: torch.Tensor, sizes: torch.Tensor, number: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Score clusters by their mean keys, and by the logarithm of their sizes.

    Args:
        q: [batch, kv_heads * group, 1, k_dim], contiguous in its last dimension.
        keys: [batch, kv_heads, blocks, k_dim, each], mean keys, component by component, of each block's clusters; a
            block's are contiguous.
        sizes: [batch, kv_heads, blocks, each] float32, tokens of a cluster, likewise.
        number: [1] or [batch] int64, the blocks that there are.
        scale, softcap: as in `gpu_ops.tiled_attention`.

    Returns [batch, kv_heads, group, blocks * each] float32; -inf for empty clusters, and behind the last block.
    """
    batch, kv_heads, blocks, k_dim, each = keys.shape
    queries = q.float().reshape(batch, kv_heads, -1, k_dim)
    scores = queries @ keys.float().movedim(4, 3).flatten(2, 3).mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + sizes.flatten(2).log()[:, :, None]
    behind = torch.arange(blocks * each, device=q.device) >= by_row(number * each, 4)
    return scores.masked_fill(behind, float("-inf"))


def choose_clusters(shares: torch.Tensor, number: torch.Tensor, each: int, budget: ClusterBudget) -> ChosenClusters:
    """As `choose_clusters_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import cluster_choice

    with torch.cuda.device(shares.device):
        return cluster_choice.choose(shares, number, each, budget)


def choose_clusters_in_torch(
    shares: torch.Tensor, number: torch.Tensor, each: int, budget: ClusterBudget
) -> ChosenClusters:
    """Choose the clusters with the largest shares, and the next ones; ties go to the earlier cluster.

    Args:
        shares: [batch, kv_heads, n] float32, not negative; from `estimated_masses.mean_shares`.
        number: [1] or [batch] int64, the blocks that there are.
        each: clusters of a block.
        budget: how many are chosen.
    """
    batch, kv_heads, _ = shares.shape
    found = empty_choice(shares, budget)
    found.is_exact.zero_()
    for row, blocks in enumerate(number.expand(batch).tolist()):
        total = blocks * each
        exact, further = budget.numbers(total) if total else (0, 0)
        for head in range(kv_heads):
            order = shares[row, head, :total].argsort(descending=True, stable=True)
            found.is_exact[row, head, order[:exact]] = 1
            found.estimated[row, head, :further] = order[exact : exact + further].sort().values.int()
            found.counts[row, head] = further
    return found


def empty_choice(shares: torch.Tensor, budget: ClusterBudget) -> ChosenClusters:
    """Room for a choice by such shares."""
    batch, kv_heads, n = shares.shape
    return ChosenClusters(
        shares.new_empty((batch, kv_heads, n), dtype=torch.int8),
        shares.new_empty((batch, kv_heads, most_estimated(budget, n)), dtype=torch.int32),
        shares.new_empty((batch, kv_heads), dtype=torch.int32),
    )


def most_estimated(budget: ClusterBudget, total: int) -> int:
    """The most clusters that are estimated, of up to `total`; room for one at least."""
    return _part_of(budget.estimated, total)


def list_tokens(
    clusters: Memory, first: int, chosen: ChosenClusters, number: torch.Tensor, slots: int,
    counts: torch.Tensor, beyond_counts: torch.Tensor,
) -> ListedTokens:  # fmt: skip
    """As `list_tokens_in_torch`, which defines the result, by two Triton kernels."""
    from hetero_kv.gpu_ops.triton_kernels import cluster_choice

    with torch.cuda.device(counts.device):
        return cluster_choice.list_tokens(clusters, first, chosen, number, slots, counts, beyond_counts)


def list_tokens_in_torch(
    clusters: torch.Tensor, first: int, chosen: ChosenClusters, number: torch.Tensor, slots: int,
    counts: torch.Tensor, beyond_counts: torch.Tensor,
) -> ListedTokens:  # fmt: skip
    """List the tokens of the clusters that are attended to.

    Args:
        clusters: [batch, kv_heads, blocks, block_size] int32, each token's cluster; a block's are contiguous.
        first: the number of the Context's first cluster.
        chosen: from `choose_clusters_in_torch`.
        number: [1] or [batch] int64, the blocks that there are.
        slots: the most tokens of `ListedTokens.chosen`.
        counts, beyond_counts: [batch, kv_heads] int32, contiguous, written.
    """
    batch, kv_heads, blocks, size = clusters.shape
    found = empty_lists((batch, kv_heads), blocks * size, slots, counts, beyond_counts)
    for row, there in enumerate(number.expand(batch).tolist()):
        for head in range(kv_heads):
            own = clusters[row, head, :there].flatten().long() - first
            tokens = (chosen.is_exact[row, head, own] == 1).nonzero()[:, 0].int()
            kept, left = tokens[:slots], tokens[slots:]
            found.chosen[row, head, : len(kept)], found.beyond[row, head, : len(left)] = kept, left
            counts[row, head], beyond_counts[row, head] = len(kept), len(left)
    return found


def empty_lists(
    lists: tuple[int, int], tokens: int, slots: int, counts: torch.Tensor, beyond_counts: torch.Tensor
) -> ListedTokens:
    """Room for the lists of Contexts of up to `tokens` tokens, with these counts."""
    widths = slots, most_beyond(tokens, slots)
    chosen, beyond = (torch.empty(*lists, width, dtype=torch.int32, device=counts.device) for width in widths)
    return ListedTokens(chosen, counts, beyond, beyond_counts)


def most_beyond(tokens: int, slots: int) -> int:
    """Room for the tokens of a Context of up to `tokens` tokens for which there are no slots; for one at least."""
    return max(tokens - slots, 1)


def _part_of(value: float, whole: int) -> int:
    return max(1, min(whole, math.ceil(value * whole) if isinstance(value, float) else int(value)))
