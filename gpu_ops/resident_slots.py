"""Chunks that a decode step attends to, in slots on a GPU: missing ones are found and fetched without the host.

Every head has as many slots as it chooses chunks. Lists of missing chunks have that length too, padded with -1, so that
no shape depends on the choice (ShadowKV, arXiv:2410.21465, section 4.2: the hit cache, values over the bus).
"""

from __future__ import annotations

import torch

from hetero_kv.gpu_ops.row_memory import AnyMemory, Memory

NONE = -1


def placed(
    resident: AnyMemory, chosen: torch.Tensor, missed: torch.Tensor
) -> tuple[AnyMemory, torch.Tensor, torch.Tensor]:
    """As `placed_in_torch`, which defines the result, by one Triton kernel on a CUDA device.

    Rows that are found by their addresses are updated, and returned.
    """
    from hetero_kv.gpu_ops.triton_kernels import resident_slots

    with torch.cuda.device(chosen.device):
        return resident_slots.place(resident, chosen.contiguous(), missed)


def placed_in_torch(
    resident: torch.Tensor, chosen: torch.Tensor, missed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep chosen chunks that are in a slot in place, and assign the free slots to the others.

    Args:
        resident: [batch, kv_heads, n] int64, the chunk in each slot; -1 for none.
        chosen: [batch, kv_heads, n] int64, distinct within a head; those below -2 are padding, which is never fetched.
        missed: [batch * kv_heads] int32, receives the number of each head's chunks that were in no slot.

    Returns, each [batch, kv_heads, n] int64: the chunk in each slot afterwards; the missing chunks in the order of
    `chosen`; and the slot of each missing chunk. The latter two are padded with -1.
    """
    same = chosen[..., :, None] == resident[..., None, :]
    lacks, is_free = ~same.any(dim=3), ~same.any(dim=2)
    count = lacks.sum(dim=2, keepdim=True)
    missed.copy_((lacks & (chosen >= 0)).sum(dim=2).flatten())
    # Missing chunks first, and free slots first, in their order.
    misses = chosen.gather(2, (~lacks).byte().argsort(dim=2, stable=True))
    into = (~is_free).byte().argsort(dim=2, stable=True)
    behind = torch.arange(chosen.shape[2], device=chosen.device) >= count
    kept = resident.gather(2, into)
    after = resident.scatter(2, into, torch.where(behind, kept, misses))
    return after, misses.masked_fill(behind, NONE), into.masked_fill(behind, NONE)


def divided(
    ids: AnyMemory, misses: torch.Tensor, into: torch.Tensor, missed: torch.Tensor, share: float, attended: AnyMemory,
    listed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `divided_in_torch`, which defines the result, by one Triton kernel."""
    from hetero_kv.gpu_ops.triton_kernels import resident_slots

    with torch.cuda.device(misses.device):
        return resident_slots.divide(ids, misses, into, missed, share, attended, listed)


def divided_in_torch(
    ids: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, missed: torch.Tensor, share: float,
    attended: torch.Tensor, listed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Divide missing chunks between the bus and the CPU, which attends to the first ones.

    Args:
        ids, misses, into, missed: as after `placed`.
        share: of each head's missing chunks that are read over the bus before the GPU attends, 0 to 1.
        attended: as `ids`; receives the chunk in each slot, or `NONE` where the CPU attends to it.
        listed: [batch, kv_heads, n] int32, receives the chunks that the CPU attends to, padded with -1.

    Returns `misses` for `fetch` in two parts: what is read before the GPU attends, and what is read behind that.
    """
    number = missed.view(misses.shape[:2])[..., None]
    of_cpu = number - (number.float() * share + 0.5).int()
    is_late = torch.arange(misses.shape[2], device=misses.device) < of_cpu
    attended.copy_(ids)
    row, head, place = is_late.nonzero(as_tuple=True)
    attended[row, head, into[row, head, place]] = NONE
    late = misses.masked_fill(~is_late, NONE)
    listed.copy_(late)
    return misses.masked_fill(is_late, NONE), late


def fetch(stored: torch.Tensor, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, out: Memory) -> None:
    """As `fetch_in_torch`, which defines the result, by one Triton kernel that reads `stored` over the bus."""
    from hetero_kv.gpu_ops.triton_kernels import resident_slots

    with torch.cuda.device(table.device):
        resident_slots.fetch(stored, table, misses, into, out)


def fetch_in_torch(
    stored: torch.Tensor, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the stored values of missing chunks into their slots, converted to the slots' dtype.

    Args:
        stored: [blocks, kv_heads, ...], contiguous; page-locked in DRAM.
        table: [batch, chunks] int32, the block of each chunk.
        misses, into: [batch, kv_heads, n] int64, from `placed`.
        out: [batch, kv_heads, slots, ...], with contiguous slots, and heads at equal distances.
    """
    row, head, listed = (misses >= 0).nonzero(as_tuple=True)
    blocks = table[row, misses[row, head, listed]].long()
    out[row, head, into[row, head, listed]] = stored[blocks, head].to(out.dtype)
