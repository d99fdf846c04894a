"""The kernels that choose and attend to blocks against their torch functions; `interpreted_kernels.py` runs this."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hetero_kv.gpu_ops.block_choice import best_blocks_in_torch, block_scores_in_torch
from hetero_kv.gpu_ops.resident_attention import attend_in_torch
from hetero_kv.gpu_ops.resident_slots import divided_in_torch, placed_in_torch
from hetero_kv.gpu_ops.slot_formats import Slots
from hetero_kv.gpu_ops.triton_kernels import block_choice, resident_attention, resident_slots, window_step
from hetero_kv.gpu_ops.window_step import join_parts_in_torch
from hetero_kv.store import storage
from tests.gpu_ops.interpreted_numbers import DTYPES, GENERATOR, difference, multiplied, random


class Scored(NamedTuple):
    """Blocks of a list of `capacity`, the number of which is on the device or not."""

    count: int
    number: int = 1
    bounds: bool = False
    capacity: int = 90
    is_on_device: bool = True
    group: int = 2
    dim: int = 24
    softcap: float | None = None
    left_out: int = 0
    packed: bool = False


SCORED = (
    Scored(70, number=2, bounds=True),
    Scored(90, number=3, is_on_device=False, left_out=5, group=5),
    Scored(1, softcap=2.0, dim=200),
    Scored(40, number=2, bounds=True, capacity=40, is_on_device=False, softcap=3.0, left_out=1),
    Scored(50, number=2, bounds=True, dim=96, packed=True),
    Scored(35, number=3, dim=32, packed=True),
)


def scored(dtype: torch.dtype, stored: torch.dtype, case: Scored) -> float:
    """Of vectors that lie block by block, heads side by side."""
    q = random(2, 1, 3 * case.group, case.dim, dtype=dtype).transpose(1, 2)
    vectors = random(case.capacity, 2, 3, case.number, case.dim, dtype=stored)
    if case.bounds and not case.packed:
        # A maximum and a minimum; packed ones may be rounded past each other.
        vectors = vectors.sort(dim=3, descending=True).values
    vectors = vectors.permute(1, 2, 0, 3, 4)
    if case.packed:
        vectors = storage.Q8_0.encode(vectors)
    left_out = None
    if case.left_out:
        order = torch.rand(2, 3, case.capacity, generator=GENERATOR).argsort(dim=2)
        left_out = order[..., : case.left_out].contiguous()
    count = torch.tensor([case.count]) if case.is_on_device else case.count
    arguments = q, vectors, count, case.bounds, 0.3, case.softcap, left_out
    found, expected = (scores(*arguments)[..., : case.count] for scores in (block_choice.score, block_scores_in_torch))
    assert torch.equal(found.isinf(), expected.isinf())
    return difference(found.masked_fill(found.isinf(), 0.0), expected.masked_fill(expected.isinf(), 0.0))


class Chosen(NamedTuple):
    """The best of the first `count` blocks; a program takes 64 at a time."""

    count: int
    n: int
    group: int = 1
    capacity: int = 230
    largest: bool = False
    softmax: bool = False
    is_shared: bool = False


CHOSEN = (
    Chosen(230, 20, group=3),
    Chosen(210, 64, largest=True, group=2),
    Chosen(30, 40, softmax=True, largest=True, group=3, capacity=35),
    Chosen(5, 5, is_shared=True, group=2),
    Chosen(0, 7),
    Chosen(200, 200, largest=True, is_shared=True, group=2),
    Chosen(225, 1, softmax=True, largest=True, group=4),
)
#: Numbers that sums and logarithms keep exact, with many equal ones; and any.
KINDS = "equal", "any", "extreme"


def chosen(kind: str, case: Chosen) -> bool:
    """Scores behind the last block are no numbers."""
    shape = 2, 3, case.group, case.capacity
    scores = random(*shape) * 5 if kind == "any" else torch.randint(-3, 4, shape, generator=GENERATOR).float()
    if kind == "extreme" and not case.softmax:
        scores = torch.where(scores == 3, float("-inf"), torch.where(scores == 2, float("nan"), scores))
        # Only whole lists: of a sum with two infinities the order is anybody's.
        scores = scores[:, :, :1].expand(shape).contiguous()
        scores = scores[:, :1].expand(shape).contiguous() if case.is_shared else scores
    scores[..., case.count :] = float("nan")
    how = case.n, case.largest, case.softmax, case.is_shared
    found, expected = (
        best(scores, count, *how)
        for best, count in ((block_choice.choose, torch.tensor([case.count])), (best_blocks_in_torch, case.count))
    )
    by_number = block_choice.choose(scores, case.count, *how)
    return torch.equal(found, by_number) and torch.equal(found, expected)


class Resident(NamedTuple):
    """A token at position `past` of a window of 90 places, and slots of which some are empty."""

    past: int
    local_start: int
    initial: int
    slots: int = 5
    empty: int = 2
    block_size: int = 8
    batch: int = 1
    kv_heads: int = 2
    group: int = 2
    k_dim: int = 16
    v_dim: int = 16
    softcap: float | None = None
    k_bits: int = 0
    v_bits: int = 0
    has_offsets: bool = False


RESIDENT = (
    Resident(200, 150, 20, batch=2, group=3, k_dim=24, v_dim=40),
    Resident(19, 0, 20, slots=3, empty=3, softcap=3.0),
    Resident(60, 40, 90, slots=0, empty=0, k_dim=200, kv_heads=1),
    Resident(95, 0, 0, block_size=3, slots=40, empty=0, group=17, kv_heads=1),
    Resident(200, 150, 20, block_size=16, k_dim=32, v_dim=96, k_bits=8, v_bits=4, batch=2),
    Resident(70, 50, 20, block_size=16, k_dim=96, v_dim=32, k_bits=4, has_offsets=True, slots=6),
    Resident(70, 50, 20, block_size=5, v_dim=64, v_bits=8, has_offsets=True),
)


def stored(shape: tuple[int, ...], bits: int, dtype: torch.dtype, has_offsets: bool) -> torch.Tensor:
    """Numbers as a pool stores them; packed and offset ones are exact in bfloat16, which the interpreter cuts off."""
    if not bits and not has_offsets:
        return random(*shape, dtype=dtype)
    codes = torch.randint(-127 if bits == 8 else -8, 128 if bits == 8 else 8, shape, generator=GENERATOR)
    if not bits:
        return codes.to(dtype) / 4
    # The largest number of a group decides its scale.
    codes[..., :: storage.ggml.GROUP] = 127 if bits == 8 else -8
    kind, scale = (storage.Q8_0, 1 / 64) if bits == 8 else (storage.Q4_0, 1 / 4)
    return kind.encode(codes.float() * scale)


def resident(dtype: torch.dtype, case: Resident) -> tuple[float, float, bool]:
    """Of the attention, of its log-sum-exp, and whether the window and what is sent are the same."""
    batch, kv_heads, heads = case.batch, case.kv_heads, case.kv_heads * case.group
    q = random(batch, 1, heads, case.k_dim, dtype=dtype).transpose(1, 2)
    k, v = (random(batch, 1, kv_heads, dim, dtype=dtype).transpose(1, 2) for dim in (case.k_dim, case.v_dim))
    dims = case.k_dim, case.v_dim
    # One place of a dense window lies behind all that it may hold.
    places = case.initial + 70 if case.initial < 90 else 91
    window = [random(batch, kv_heads, places, dim, dtype=dtype) for dim in dims]
    of_slots = batch, kv_heads, case.slots
    slots = Slots(
        *(
            stored((*of_slots, case.block_size, dim), bits, dtype, has_offsets)
            for dim, bits, has_offsets in (
                (case.k_dim, case.k_bits, case.has_offsets),
                (case.v_dim, case.v_bits, False),
            )
        ),
        stored((*of_slots, 1, case.k_dim), 0, torch.float16, True) if case.has_offsets else None,
    )
    ids = torch.arange(case.slots).expand(batch, kv_heads, -1).clone()
    ids[..., : case.empty] = -3
    numbers = torch.tensor([case.past, case.local_start, 9])
    results, left = [], []
    for attend, join, splits in (
        (resident_attention.attend, window_step.join_parts, 2),
        (attend_in_torch, join_parts_in_torch, 4),
    ):
        kept = tuple(part.clone() for part in window)
        sent = tuple(torch.full(part.shape, torch.nan) for part in (k, v))
        whole = kept, case.initial, ids, slots, numbers, 0.3, case.softcap, sent, splits
        out, lse = torch.empty(batch, heads, 1, case.v_dim, dtype=dtype), torch.empty(batch, heads)
        parts = attend(q, k, v, *whole)
        join(*parts, None, None, out, lse)
        results.append((out, lse))
        left.append((*kept, *sent))
    apart = [difference(actual, expected) for actual, expected in zip(*results, strict=True)]
    return *apart, all(torch.equal(actual, expected) for actual, expected in zip(*left, strict=True))


def padded(count: int, real: int) -> bool:
    """Slots and choices with padding, of which the numbers differ."""
    lists = []
    for some in (real // 2, real):
        order = torch.rand(2, 2, 50, generator=GENERATOR).argsort(dim=2)[..., :count]
        padding = torch.arange(count).expand_as(order)
        lists.append(torch.where(padding < some, order, -3 - padding).contiguous())
    missed = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
    pairs = zip(resident_slots.place(*lists, missed[0]), placed_in_torch(*lists, missed[1]), strict=True)
    return torch.equal(*missed) and all(torch.equal(actual, expected) for actual, expected in pairs)


def divided(count: int, real: int, share: float) -> bool:
    """Missing blocks, padding among them, of which the CPU attends to some."""
    resident, chosen = (torch.rand(2, 2, 50, generator=GENERATOR).argsort(dim=2)[..., :count] for _ in range(2))
    chosen = torch.where(torch.arange(count) < real, chosen, -3 - torch.arange(count))
    missed, results = torch.zeros(4, dtype=torch.int32), []
    ids, misses, into = placed_in_torch(resident, chosen, missed)
    for divide in (resident_slots.divide, divided_in_torch):
        attended, listed = torch.zeros_like(ids), torch.zeros(2, 2, count, dtype=torch.int32)
        results.append((*divide(ids, misses, into, missed, share, attended, listed), attended, listed))
    return all(torch.equal(actual, expected) for actual, expected in zip(*results, strict=True))


def of_choice() -> dict[str, dict[str, Any]]:
    """Of each kernel, by case, how far apart they are, or whether they are the same."""
    pairs = [(dtype, stored) for dtype in DTYPES for stored in dict.fromkeys((dtype, torch.float16))]
    return {
        "scored": {
            f"{dtype}, {stored}, {case}": scored(dtype, stored, case)
            for (dtype, stored), case in multiplied(pairs, SCORED)
        },
        "chosen": {f"{kind}, {case}": chosen(kind, case) for kind, case in multiplied(KINDS, CHOSEN)},
        "resident": {f"{dtype}, {case}": resident(dtype, case) for dtype, case in multiplied(DTYPES, RESIDENT)},
        "padded": {f"{count}, {real}": padded(count, real) for count, real in ((7, 4), (40, 0), (40, 39))},
        "divided": {
            f"{count}, {real}, {share}": divided(count, real, share)
            for count, real, share in ((7, 4, 0.3), (40, 40, 0.0), (40, 39, 0.5), (40, 30, 1.0), (16, 0, 0.5))
        },
    }
