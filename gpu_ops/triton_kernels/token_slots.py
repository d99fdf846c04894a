"""Finds slots for missing tokens on the GPU, and reads these from DRAM; `gpu_ops.token_slots` defines the results."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hetero_kv.gpu_ops.row_memory import Memory, viewed
from hetero_kv.gpu_ops.token_slots import TokenSlots
from hetero_kv.gpu_ops.triton_kernels.row_memory import alignment, has_row, kind, pointer, row_of

# Slots or chosen tokens per step of a list.
_STEP = 4096
# Programs per list that read from DRAM, and bytes that each reads at once: together they cover the bus's latency.
_READERS, _READ = 32, 4096
# Of each slot whether its token stays, and a free slot.
_NOTES = torch.int8, torch.int32


@triton.jit
def _place_tokens(
    chosen, counts, ids, slot_of, following, at, misses, into, missed, stays, free, width, size, capacity, kv_heads,
    STEP: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(0).to(tl.int64)
    chosen, at, misses, into = (
        chosen + each * width,
        at + each * width,
        misses + each * width,
        into + each * width,
    )
    row, head, stays, free = each // kv_heads, each % kv_heads, stays + each * size, free + each * size
    # Of a row without memory no token is chosen.
    is_row = has_row(ids, row, ALIGNMENT)
    ids = row_of(ids, row, kv_heads * size, tl.int32, ALIGNMENT) + head * size
    slot_of = row_of(slot_of, row, kv_heads * capacity, tl.int32, ALIGNMENT) + head * capacity
    following = row_of(following, row, kv_heads, tl.int32, ALIGNMENT) + head
    count, first = tl.load(counts + each), tl.arange(0, STEP)
    for start in range(0, size, STEP):
        tl.store(stays + start + first, tl.zeros([STEP], tl.int8), mask=start + first < size)
    tl.debug_barrier()
    for start in range(0, count, STEP):
        place = start + first
        is_there = place < count
        token = tl.load(chosen + place, mask=is_there, other=0)
        slot = tl.load(slot_of + token, mask=is_there, other=0)
        is_hit = (tl.load(ids + slot, mask=is_there, other=-1) == token) & is_there
        tl.store(at + place, tl.where(is_hit, slot, -1), mask=is_there)
        tl.store(stays + slot, tl.full([STEP], 1, tl.int8), mask=is_hit)
    tl.debug_barrier()

    # The free slots in order, those from `following` on before the others.
    begin = tl.load(following, mask=is_row, other=0)
    in_front, in_all = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, size, STEP):
        slot = start + first
        is_free = (tl.load(stays + slot, mask=slot < size, other=1) == 0).to(tl.int32)
        in_front += tl.sum(tl.where(slot < begin, is_free, 0), 0)
        in_all += tl.sum(is_free, 0)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, size, STEP):
        slot = start + first
        is_free = tl.load(stays + slot, mask=slot < size, other=1) == 0
        order = seen + tl.cumsum(is_free.to(tl.int32), 0) - 1 - in_front
        tl.store(free + tl.where(order < 0, order + in_all, order), slot, mask=is_free)
        seen += tl.sum(is_free.to(tl.int32), 0)
    tl.debug_barrier()

    lacking, last = tl.full([], 0, tl.int32), begin - 1
    for start in range(0, count, STEP):
        place = start + first
        is_there = place < count
        token = tl.load(chosen + place, mask=is_there, other=0)
        is_lacking = (tl.load(at + place, mask=is_there, other=0) < 0) & is_there
        order = lacking + tl.cumsum(is_lacking.to(tl.int32), 0) - 1
        slot = tl.load(free + tl.maximum(order, 0), mask=is_there, other=0)
        tl.store(at + place, slot, mask=is_lacking)
        tl.store(ids + slot, token, mask=is_lacking)
        tl.store(slot_of + token, slot, mask=is_lacking)
        tl.store(misses + order, token, mask=is_lacking)
        tl.store(into + order, slot, mask=is_lacking)
        new = tl.sum(is_lacking.to(tl.int32), 0)
        lacking += new
        newest = tl.sum(tl.where(is_lacking & (order == lacking - 1), slot, 0), 0)
        last = tl.where(new > 0, newest, last)
    tl.store(missed + each, lacking)
    tl.store(following, (last + 1) % size, mask=is_row)


@triton.jit
def _fetch_tokens(
    stored, table, misses, into, missed, out, heads, blocks, tokens, width, listed, size,
    READERS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    each, row, column = tl.program_id(1).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    count = tl.load(missed + each)
    is_column = column < width
    out = row_of(out, each // heads, heads * size * width, KIND, ALIGNMENT) + each % heads * size * width
    for start in range(tl.program_id(0) * ROWS, count, READERS * ROWS):
        place = start + row
        is_miss = place < count
        token = tl.load(misses + each * listed + place, mask=is_miss, other=0)
        slot = tl.load(into + each * listed + place, mask=is_miss, other=0).to(tl.int64)
        block = tl.load(table + each // heads * blocks + token // tokens, mask=is_miss, other=0).to(tl.int64)
        source = ((block * heads + each % heads) * tokens + token % tokens) * width
        is_number = is_miss[:, None] & is_column[None, :]
        found = tl.load(stored + source[:, None] + column[None, :], mask=is_number, other=0)
        tl.store(out + (slot * width)[:, None] + column[None, :], found.to(out.dtype.element_ty), mask=is_number)


def place(
    slots: TokenSlots[Any], chosen: torch.Tensor, counts: torch.Tensor, missed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `gpu_ops.token_slots.place_tokens_in_torch`, for contiguous tensors."""
    (batch, kv_heads, width), size = chosen.shape, slots.ids.shape[2]
    at, misses, into = (torch.empty_like(chosen) for _ in range(3))
    stays, free = (torch.empty(batch, kv_heads, size, dtype=each, device=chosen.device) for each in _NOTES)
    step = max(16, min(_STEP, triton.next_power_of_2(max(width, size))))
    _place_tokens[(batch * kv_heads,)](
        chosen, counts, *map(pointer, slots), at, misses, into, missed, stays, free, width, size,
        slots.slot_of.shape[2], kv_heads,
        STEP=step, ALIGNMENT=alignment(*slots), num_warps=8,
    )  # fmt: skip
    return at, misses, into


def fetch(
    stored: torch.Tensor, table: torch.Tensor, misses: torch.Tensor, into: torch.Tensor, missed: torch.Tensor,
    out: Memory,
) -> None:  # fmt: skip
    """As `gpu_ops.token_slots.fetch_tokens_in_torch`; `stored` is page-locked, or on the device too."""
    if stored.dtype == torch.uint8:
        # Groups of packed numbers have an even number of bytes.
        stored, out = stored.view(torch.int16), viewed(out, torch.int16)
    (_, heads, tokens, width), (batch, _, size, _) = stored.shape, out.shape
    block = triton.next_power_of_2(width)
    rows = max(1, _READ // (block * stored.element_size()))
    _fetch_tokens[(_READERS, batch * heads)](
        stored, table, misses, into, missed, pointer(out), heads, table.shape[1], tokens, width, misses.shape[2], size,
        READERS=_READERS, ROWS=rows, BLOCK=block, KIND=kind(out), ALIGNMENT=alignment(out),
    )  # fmt: skip
