"""Attention on a GPU to clusters of tokens, as if all tokens of one had its mean key and mean value.

RetroInfer (Chen et al. 2025, arXiv:2505.02922), section 4.2. The result is a part of a decoded token's attention, as in
`gpu_ops.token_attention`.
"""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.resident_attention import SPLITS
from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.token_attention import STORED_PARTS, TOKEN_PARTS, Parts

#: Parts that the clusters are divided into, the last ones, and all parts; of the latter a power of two.
CLUSTER_PARTS = SPLITS
PARTS = SPLITS + TOKEN_PARTS + STORED_PARTS + CLUSTER_PARTS


def attend_to_clusters(
    scores: torch.Tensor, sums: Memory, sizes: Memory, listed: torch.Tensor, counts: torch.Tensor, parts: Parts
) -> torch.Tensor:
    """As `attend_to_clusters_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import cluster_attention

    with torch.cuda.device(scores.device):
        return cluster_attention.attend_to_clusters(scores, sums, sizes, listed, counts, parts)


def attend_to_clusters_in_torch(
    scores: torch.Tensor, sums: torch.Tensor, sizes: torch.Tensor, listed: torch.Tensor, counts: torch.Tensor,
    parts: Parts,
) -> torch.Tensor:  # fmt: skip
    """Attend to listed clusters.

    Args:
        scores: [batch, kv_heads, group, clusters] float32, from `cluster_choice.score_clusters`.
        sums: [batch, kv_heads, blocks, each, v_dim] float32, of the values of a cluster's tokens; a block's are
            contiguous.
        sizes: [batch, kv_heads, blocks, each] float32, tokens of a cluster, likewise.
        listed: [batch, kv_heads, n] int32, the clusters.
        counts: [batch, kv_heads] int32, how many of each list.
        parts: receives `CLUSTER_PARTS` parts, the last ones.

    Returns the log-sum-exp of these parts, [batch, kv_heads, CLUSTER_PARTS, group] float32, contiguous.
    """
    first = parts.out.shape[2] - CLUSTER_PARTS
    parts.out[:, :, first:], parts.lse[:, :, first:] = 0.0, float("-inf")
    means = (sums / sizes.clamp(min=1)[..., None]).flatten(2, 3)
    for row in range(len(listed)):
        for head in range(listed.shape[1]):
            at = listed[row, head, : int(counts[row, head])].long()
            taken = scores[row, head][:, at]
            lse = taken.logsumexp(dim=1)
            weights = (taken - lse.masked_fill(lse == float("-inf"), 0.0)[:, None]).exp()
            parts.out[row, head, first], parts.lse[row, head, first] = weights @ means[row, head, at], lse
    return parts.lse[:, :, first:].contiguous()
