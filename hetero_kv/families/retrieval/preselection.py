"""Preselection: the blocks that a prompt's last queries attend to are the candidates for the whole answer.

SnapKV's vote (section 4, listing 1) applied to blocks, as in KTransformers' framework.
"""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.cpu_ops.top_k import top_k_blocks


def block_votes(received: torch.Tensor, first: int, end: int, block_size: int, kernel_size: int) -> torch.Tensor:
    """A block's vote: the attention that its tokens received, pooled along tokens and averaged over the block.

    Args:
        received: [batch, kv_heads, length] float32, summed over the observation window and the group's heads.
        first, end: the Context's blocks.
        kernel_size: tokens of the average pooling, odd; 1 for no pooling. Positions outside the Context count as zero.

    Returns [batch, kv_heads, end - first] float32.
    """
    context = received[:, :, first * block_size : end * block_size]
    if kernel_size > 1:
        context = torch.nn.functional.avg_pool1d(context, kernel_size, stride=1, padding=kernel_size // 2)
    return context.unflatten(2, (end - first, block_size)).mean(dim=3)


def preselect(votes: torch.Tensor, count: int, shared: bool) -> np.ndarray:
    """The `count` blocks with the most votes, ascending; ties go to the earlier block.

    Args:
        votes: [batch, kv_heads, blocks] float32.
        count: at most `blocks`.
        shared: kv heads vote together (SHARED), rather than separately (SEPARATE).

    Returns [batch, 1 or kv_heads, count] int32, positions among the blocks.
    """
    if shared:
        votes = votes.mean(dim=1, keepdim=True)
    batch, lists, blocks = votes.shape
    scores = np.ascontiguousarray(votes.reshape(batch * lists, blocks).cpu().numpy())
    positions, _ = top_k_blocks(scores, np.full(batch * lists, blocks, dtype=np.int32), count)
    return positions.reshape(batch, lists, count)
