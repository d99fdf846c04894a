"""Chunks that a decode step attends to, in slots on a GPU: what is missing is found and fetched without the host.

Every head has as many slots as it chooses chunks. Lists of missing chunks have that size too, -1 behind their end, so
that no shape depends on what was chosen (ShadowKV, arXiv:2410.21465, section 4.2: the hit cache, values over the bus).
"""

from __future__ import annotations

import torch

NONE = -1


def placed(
    held: torch.Tensor, wanted: torch.Tensor, missed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `placed_in_torch`, which defines the result, by one Triton kernel on a CUDA device."""
    from gpu_ops.triton_kernels import resident_slots

    with torch.cuda.device(wanted.device):
        return resident_slots.place(held, wanted.contiguous(), missed)


def placed_in_torch(
    held: torch.Tensor, wanted: torch.Tensor, missed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Let chosen chunks that are held stay where they are, and give the others the slots that are free.

    Args:
        held: [batch, kv_heads, n] int64, the chunk in each slot; -1 for none.
        wanted: [batch, kv_heads, n] int64, the chosen chunks, without repetition in a head.
        missed: [batch * kv_heads] int32, to hold how many of each head's were in no slot.

    Returns, of [batch, kv_heads, n] int64 each, the chunk in each slot afterwards, the missing chunks in the order in
    which they are wanted, and the slot that each of them gets; -1 behind their end.
    """
    same = wanted[..., :, None] == held[..., None, :]
    lacks, is_free = ~same.any(dim=3), ~same.any(dim=2)
    count = lacks.sum(dim=2, keepdim=True)
    missed.copy_(count.flatten())
    # Missing ones first, and free slots first, each in its order.
    misses = wanted.gather(2, (~lacks).byte().argsort(dim=2, stable=True))
    into = (~is_free).byte().argsort(dim=2, stable=True)
    behind = torch.arange(wanted.shape[2], device=wanted.device) >= count
    kept = held.gather(2, into)
    after = held.scatter(2, into, torch.where(behind, kept, misses))
    return after, misses.masked_fill(behind, NONE), into.masked_fill(behind, NONE)


def fetch(
    stored: torch.Tensor, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, out: torch.Tensor
) -> None:
    """As `fetch_in_torch`, which defines the result, by one Triton kernel that reads `stored` over the bus."""
    from gpu_ops.triton_kernels import resident_slots

    with torch.cuda.device(out.device):
        resident_slots.fetch(stored, table, misses, into, out)


def fetch_in_torch(
    stored: torch.Tensor, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, out: torch.Tensor
) -> None:
    """Write what is stored of missing chunks into their slots, in the number format of those.

    Args:
        stored: [blocks, kv_heads, ...], contiguous; page-locked in DRAM.
        table: [batch, chunks] int32, the block that holds each chunk.
        misses, into: [batch, kv_heads, n] int64, as `placed` gives them.
        out: [batch, kv_heads, slots, ...], of which a slot is contiguous and heads lie one behind the other evenly.
    """
    row, head, listed = (misses >= 0).nonzero(as_tuple=True)
    blocks = table[row, misses[row, head, listed]].long()
    out[row, head, into[row, head, listed]] = stored[blocks, head].to(out.dtype)
