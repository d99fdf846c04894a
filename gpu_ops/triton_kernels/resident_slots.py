"""Finds missing chunks on the GPU, and reads their values directly from DRAM.

`gpu_ops.resident_slots.placed_in_torch`, `divided_in_torch` and `fetch_in_torch` define the results. The memory in DRAM
is page-locked, so the GPU has an address for it: no byte passes the CPU, and the host need not know which rows are
read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.row_memory import AnyMemory, Memory, RowMemory
from hetero_kv.gpu_ops.triton_kernels.row_memory import alignment, has_row, kind, pointer, row_of

_BLOCK = 1024
# Comparisons of chosen chunks with slots per step.
_COMPARED = 8192


@triton.jit
def _place(
    resident, chosen, after, misses, into, missed, count, kv_heads,
    SLOTS: tl.constexpr, TILE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(0).to(tl.int64)
    first, row, of_row = each * count, each // kv_heads, kv_heads * count
    # A row without memory has no slots, and misses nothing.
    slots = tl.where(has_row(resident, row, ALIGNMENT), count, 0)
    resident = row_of(resident, row, of_row, tl.int64, ALIGNMENT) + each % kv_heads * count
    after = row_of(after, row, of_row, tl.int64, ALIGNMENT) + each % kv_heads * count
    place = tl.arange(0, SLOTS)
    is_chosen = place < slots
    # Padding is -2, which equals no chunk and no empty slot (-1).
    chunk = tl.load(chosen + first + place, mask=is_chosen, other=-2)
    is_hit = tl.zeros([SLOTS], tl.int32)
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        there = tl.load(resident + slot, mask=slot < slots, other=-1)
        is_hit = tl.maximum(is_hit, tl.max((chunk[:, None] == there[None, :]).to(tl.int32), axis=1))
    is_lacking = is_chosen & (is_hit == 0)
    rank = tl.cumsum(is_lacking.to(tl.int32), 0) - 1

    # `after` may be the same memory.
    tl.debug_barrier()
    # As many slots are free as chunks are missing; the i-th missing chunk takes the i-th free slot.
    free = 0
    for start in range(0, slots, TILE):
        slot = start + tl.arange(0, TILE)
        there = tl.load(resident + slot, mask=slot < slots, other=-1)
        stays = tl.max((chunk[:, None] == there[None, :]).to(tl.int32), axis=0)
        is_free = (slot < slots) & (stays == 0)
        order = free + tl.cumsum(is_free.to(tl.int32), 0) - 1
        takes = is_lacking[:, None] & is_free[None, :] & (rank[:, None] == order[None, :])
        new = tl.sum(tl.where(takes, chunk[:, None], 0), axis=0)
        tl.store(after + slot, tl.where(is_free, new, there), mask=slot < slots)
        tl.store(misses + first + order, new, mask=is_free)
        tl.store(into + first + order, slot.to(tl.int64), mask=is_free)
        free += tl.sum(is_free.to(tl.int32), 0)
    rest = (place < count) & (place >= free)
    tl.store(misses + first + place, tl.full([SLOTS], -1, tl.int64), mask=rest)
    tl.store(into + first + place, tl.full([SLOTS], -1, tl.int64), mask=rest)
    # Padding of the chosen chunks takes slots, too, but is not fetched.
    tl.store(missed + each, tl.sum((is_lacking & (chunk >= 0)).to(tl.int32), 0))


@triton.jit
def _divide(
    ids, misses, into, missed, attended, listed, early, late, count, kv_heads, share,
    SLOTS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(0).to(tl.int64)
    first, row, of_row = each * count, each // kv_heads, kv_heads * count
    slots = tl.where(has_row(ids, row, ALIGNMENT), count, 0)
    ids = row_of(ids, row, of_row, tl.int64, ALIGNMENT) + each % kv_heads * count
    attended = row_of(attended, row, of_row, tl.int64, ALIGNMENT) + each % kv_heads * count
    place = tl.arange(0, SLOTS)
    is_listed = place < count
    tl.store(attended + place, tl.load(ids + place, mask=place < slots, other=-1), mask=place < slots)
    number = tl.load(missed + each)
    is_late = is_listed & (place < number - (number.to(tl.float32) * share + 0.5).to(tl.int32))
    chunk = tl.load(misses + first + place, mask=is_listed, other=-1)
    slot = tl.load(into + first + place, mask=is_listed, other=-1)
    tl.debug_barrier()
    tl.store(attended + slot, tl.full([SLOTS], -1, tl.int64), mask=is_late & (place < slots))
    of_cpu = tl.where(is_late, chunk, -1)
    tl.store(listed + first + place, of_cpu.to(tl.int32), mask=is_listed)
    tl.store(late + first + place, of_cpu, mask=is_listed)
    tl.store(early + first + place, tl.where(is_late, -1, chunk), mask=is_listed)


@triton.jit
def _fetch(
    stored, table, misses, into, out, count, heads, blocks, width, out_head,
    BLOCK: tl.constexpr, KIND: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    listed = tl.program_id(0).to(tl.int64)
    head = listed // count
    chunk = tl.load(misses + listed)
    # Nothing is read for padding, because the bus is the bottleneck.
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_number = (column < width) & (chunk >= 0)
    block = tl.load(table + head // heads * blocks + tl.maximum(chunk, 0)).to(tl.int64)
    found = tl.load(stored + (block * heads + head % heads) * width + column, mask=is_number, other=0)
    out = row_of(out, head // heads, heads * out_head, KIND, ALIGNMENT) + head % heads * out_head
    to = out + tl.load(into + listed) * width + column
    tl.store(to, found.to(out.dtype.element_ty), mask=is_number)


def place(
    resident: AnyMemory, chosen: torch.Tensor, missed: torch.Tensor
) -> tuple[AnyMemory, torch.Tensor, torch.Tensor]:
    """As `gpu_ops.resident_slots.placed_in_torch`, for contiguous tensors."""
    batch, kv_heads, count = chosen.shape
    misses, into = torch.empty_like(chosen), torch.empty_like(chosen)
    after = resident if isinstance(resident, RowMemory) else torch.empty_like(chosen)
    slots = max(16, triton.next_power_of_2(count))
    tile = max(2, min(64, _COMPARED // slots))
    _place[(batch * kv_heads,)](
        pointer(resident), chosen, pointer(after), misses, into, missed, count, kv_heads, SLOTS=slots, TILE=tile,
        ALIGNMENT=alignment(resident),
    )  # fmt: skip
    return after, misses, into


def divide(
    ids: AnyMemory, misses: torch.Tensor, into: torch.Tensor, missed: torch.Tensor, share: float, attended: AnyMemory,
    listed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `gpu_ops.resident_slots.divided_in_torch`, for contiguous tensors."""
    batch, kv_heads, count = misses.shape
    early, late = torch.empty_like(misses), torch.empty_like(misses)
    _divide[(batch * kv_heads,)](
        pointer(ids), misses, into, missed, pointer(attended), listed, early, late, count, kv_heads, share,
        SLOTS=max(16, triton.next_power_of_2(count)), ALIGNMENT=alignment(ids, attended),
    )  # fmt: skip
    return early, late


def fetch(stored: torch.Tensor, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, out: Memory) -> None:
    """As `gpu_ops.resident_slots.fetch_in_torch`; `stored` is page-locked, or on the device too."""
    heads, width = stored.shape[1], stored[0, 0].numel()
    grid = (misses.numel(), triton.cdiv(width, _BLOCK))
    numbers = misses.shape[2], heads, table.shape[1], width, out.stride(1)
    places = {"KIND": kind(out), "ALIGNMENT": alignment(out)}
    _fetch[grid](stored, table, misses, into, pointer(out), *numbers, BLOCK=_BLOCK, **places)
