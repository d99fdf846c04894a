"""Chooses on a GPU, without the host, as few blocks or single tokens as reach a share of the attention.

The choices are those of `cpu_ops.block_choice` and `cpu_ops.chosen_tokens`. How many are chosen is a number on the
device for each kv head, bounded by the length of the list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: The smallest share of a block's remaining tokens that counts, as on the CPU.
SMALLEST_SHARE = 2.0**-126
#: Columns of what is counted of each kv head's choice: tokens, candidate blocks, blocks with a chosen token, and blocks
#: of which every token is chosen.
TOKENS, CANDIDATES, TOUCHED, WHOLE = range(4)


class Target(NamedTuple):
    """How many entries of a list are chosen.

    Attributes:
        share: of the attention, to be reached by as few entries as possible; 0 to choose `most`.
        least, most: bounds of that number.
        times: multiplies the number afterwards.
        covering: Contexts of up to so many blocks are chosen as a whole.
    """

    share: float
    least: int
    most: int
    times: int
    covering: int


def choose(
    keys: torch.Tensor, shares: torch.Tensor, totals: torch.Tensor, number: torch.Tensor, unit: int,
    places: torch.Tensor | None, place_counts: torch.Tensor | None, target: Target, chosen: torch.Tensor,
    counts: torch.Tensor, taken: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """As `choose_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import token_choice

    with torch.cuda.device(keys.device):
        token_choice.choose(keys, shares, totals, number, unit, places, place_counts, target, chosen, counts, taken)


def choose_in_torch(
    keys: torch.Tensor, shares: torch.Tensor, totals: torch.Tensor, number: torch.Tensor, unit: int,
    places: torch.Tensor | None, place_counts: torch.Tensor | None, target: Target, chosen: torch.Tensor,
    counts: torch.Tensor, taken: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Choose the entries with the largest keys of each list; ties go to the earlier entry.

    Args:
        keys, shares: [batch, kv_heads, n] float32, not negative; from `estimated_masses.mean_shares`.
        totals: from `estimated_masses.log_totals`; what is always attended to counts for the target.
        number: [1] or [batch] int64, blocks of the Context.
        unit: entries of a block: 1, or its tokens.
        places: [batch, kv_heads, n / unit] int32, the blocks of the entries, ascending; None for all blocks.
        place_counts: [batch, kv_heads] int32, places that there are; None for all blocks.
        target: how many are chosen.
        chosen: [batch, kv_heads, width] int32, receives the entries, ascending, as numbers in the Context (block * unit
            + offset); -1 behind the last.
        counts: [batch, kv_heads] int32, receives their numbers.
        taken: [batch, kv_heads, n] int8, receives 1 for a chosen entry and 0 for others; None if nobody reads it.
    """
    batch, kv_heads, n = keys.shape
    before = (totals[2] - totals[1]).exp().mean(dim=2)
    chosen.fill_(-1)
    if taken is not None:
        taken.zero_()
    for row, context in enumerate(number.expand(batch).tolist()):
        for head in range(kv_heads):
            blocks = context if place_counts is None else int(place_counts[row, head])
            there = min(blocks * unit, n)
            order = keys[row, head, :there].argsort(descending=True, stable=True)
            count = target.most
            if target.share:
                # float64, since the CPU's and a kernel's sums come in orders of their own.
                reached = shares[row, head, order].double().cumsum(0) - shares[row, head, order].double()
                needed = torch.tensor(target.share, dtype=torch.float32) - before[row, head]
                count = int((reached < needed).sum()) if needed > 0 else 0
                count = max(count, target.least)
            count = min(min(count, target.most, there) * target.times, there, chosen.shape[2])
            if context <= target.covering:
                count = there
            best = order[:count].sort().values
            counts[row, head] = count
            if taken is not None:
                taken[row, head, best] = 1
            block = best // unit
            block = block if places is None else places[row, head, block].long()
            chosen[row, head, :count] = (block * unit + best % unit).int()


def leave(
    token_scores: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, totals: torch.Tensor, weights: torch.Tensor,
    masses: torch.Tensor, counted: torch.Tensor,
) -> None:  # fmt: skip
    """As `leave_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import token_choice

    with torch.cuda.device(taken.device):
        token_choice.leave(token_scores, taken, places, totals, weights, masses, counted)


def leave_in_torch(
    token_scores: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, totals: torch.Tensor, weights: torch.Tensor,
    masses: torch.Tensor, counted: torch.Tensor,
) -> None:  # fmt: skip
    """Let the blocks of chosen tokens stand for the tokens that remain in them.

    Args:
        token_scores: [batch, kv_heads, group, n * size] float32, of the tokens of the blocks at `places`.
        taken: [batch, kv_heads, n * size] int8, from `choose_in_torch`.
        places: [batch, kv_heads, n] int32, distinct blocks; negative for padding.
        totals: from `estimated_masses.log_totals`.
        weights, masses: [batch, kv_heads, group, capacity] float32 (`estimated_masses.BlockMasses`), updated.
        counted: [batch, kv_heads, 4] int32; the last two columns (`TOUCHED`, `WHOLE`) are added to.
    """
    size, capacity = taken.shape[2] // max(1, places.shape[2]), weights.shape[3]
    of_blocks = taken.unflatten(2, (-1, size)).int()
    count = of_blocks.sum(dim=3) * (places >= 0)
    shares = (token_scores - totals[1][..., None]).exp().unflatten(3, (-1, size))
    left = torch.where(of_blocks[:, :, None] > 0, 0.0, shares).sum(dim=4)
    mass = torch.where(left > SMALLEST_SHARE, totals[1][..., None] + left.clamp(min=SMALLEST_SHARE).log(), -torch.inf)
    behind = torch.where(count > 0, places.long(), capacity)[:, :, None].expand_as(left)
    fewer = ((size - count) / size).log()[:, :, None].expand_as(left)
    for array, new in ((weights, None), (masses, mass)):
        padded = torch.nn.functional.pad(array, (0, 1))
        new = padded.gather(3, behind) + fewer if new is None else new
        array.copy_(padded.scatter(3, behind, new)[..., :capacity])
    counted[:, :, TOUCHED] += (count > 0).sum(dim=2).int()
    counted[:, :, WHOLE] += (count == size).sum(dim=2).int()
