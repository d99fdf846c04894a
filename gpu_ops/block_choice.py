"""Chooses blocks on a GPU by the vectors that represent them, without the host.

Scores and choice are one launch of a Triton kernel each. The number of blocks may be a number on the device.
"""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.row_memory import Memory, by_row
from hetero_kv.gpu_ops.slot_formats import unpacked

#: Chosen blocks are padded with -3, -4, ...: negative, distinct within a list, and neither of the markers of
#: `gpu_ops.resident_slots`.
FIRST_PADDING = -3


def block_scores(
    q: torch.Tensor,
    vectors: Memory,
    count: int | torch.Tensor,
    bounds: bool,
    scale: float,
    softcap: float | None = None,
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `block_scores_in_torch`, which defines the result; entries after the last block are undefined."""
    from hetero_kv.gpu_ops.triton_kernels import block_choice

    q = q if q.stride(3) == 1 else q.contiguous()
    left_out = None if left_out is None else left_out.contiguous()
    with torch.cuda.device(q.device):
        return block_choice.score(q, vectors, count, bounds, scale, softcap, left_out)


def block_scores_in_torch(
    q: torch.Tensor,
    vectors: torch.Tensor,
    count: int | torch.Tensor,
    bounds: bool,
    scale: float,
    softcap: float | None = None,
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score blocks for every query head, in float32.

    Args:
        q: [batch, kv_heads * group, 1, dim].
        vectors: [batch, kv_heads, capacity, number, dim], of the blocks, or [..., bytes] uint8 of groups
            (`gpu_ops.slot_formats`); the last two dimensions are contiguous.
        count: blocks that there are; a tensor [1] or [batch] int64 on the device, or a number.
        bounds: whether the two vectors are a block's maximum and minimum, which give an upper bound of its keys' scores
            (Quest, arXiv:2406.10774, algorithm 1); otherwise the largest product counts. Of a channel whose maximum is
            the smaller number, because packed vectors are rounded apart, the larger one counts as on the CPU.
        scale, softcap: as in `gpu_ops.tiled_attention`.
        left_out: [batch, kv_heads, n] int64, blocks that get -inf; None for none.

    Returns [batch, kv_heads, group, capacity], -inf after the last block.
    """
    (batch, kv_heads, capacity, *_), dim = vectors.shape, q.shape[3]
    queries, numbers = q.float().reshape(batch, kv_heads, -1, 1, dim), unpacked(vectors, dim)
    if bounds:
        most, least = numbers.amax(dim=3), numbers.amin(dim=3)
        scores = queries.clamp(min=0) @ most[:, :, None].mT + queries.clamp(max=0) @ least[:, :, None].mT
        scores = scores.squeeze(3)
    else:
        scores = (queries @ numbers.flatten(2, 3)[:, :, None].mT).squeeze(3).unflatten(3, (capacity, -1)).amax(dim=4)
    scores = scores * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if left_out is not None:
        scores = scores.scatter(3, left_out[:, :, None].expand(-1, -1, scores.shape[2], -1), float("-inf"))
    return scores.masked_fill(torch.arange(capacity, device=q.device) >= by_row(count, 4), float("-inf"))


def best_blocks(
    scores: torch.Tensor, count: int | torch.Tensor, n: int, largest: bool, softmax: bool = False,
    is_shared: bool = False,
) -> torch.Tensor:  # fmt: skip
    """As `best_blocks_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import block_choice

    with torch.cuda.device(scores.device):
        return block_choice.choose(scores, count, n, largest, softmax, is_shared)


def best_blocks_in_torch(
    scores: torch.Tensor, count: int | torch.Tensor, n: int, largest: bool, softmax: bool = False,
    is_shared: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The `n` best of the first `count` blocks for each kv head, ascending; ties go to the lower block.

    Args:
        scores: [batch, kv_heads, group, capacity] float32, from `block_scores`.
        count: as for `block_scores`.
        largest: whether a kv head's score is the largest of its group's, rather than their mean.
        softmax: whether each query head's softmax over the blocks counts, not the scores; with `largest` only.
        is_shared: whether all kv heads choose together, by the sum of their scores; not with `softmax`.

    Returns [batch, kv_heads, n] int64, padded with negative numbers (`FIRST_PADDING`).
    """
    index = torch.arange(scores.shape[3], device=scores.device)
    if softmax:
        scores = scores.masked_fill(index >= by_row(count, 4), float("-inf"))
        total = scores.logsumexp(dim=3, keepdim=True)
        scores = scores - total.masked_fill(total == float("-inf"), 0.0)
    reduced = scores.amax(dim=2) if largest else scores.sum(dim=2)
    if is_shared:
        reduced = reduced.sum(dim=1, keepdim=True).expand_as(reduced)
    order = reduced.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=torch.finfo(torch.float32).min)
    order = order.masked_fill(index >= by_row(count, 3), float("-inf"))
    found = order.argsort(dim=2, descending=True, stable=True)[:, :, :n]
    place = torch.arange(n, device=scores.device)
    taken = torch.as_tensor(by_row(count, 3), device=scores.device).clamp(max=n)
    found = torch.nn.functional.pad(found, (0, n - found.shape[2]))
    # Padding is sorted after all blocks.
    ascending = found.masked_fill(place >= taken, scores.shape[3]).sort(dim=2).values
    return torch.where(place >= taken, FIRST_PADDING - place, ascending)
