"""Launches of the kernels that choose single tokens and attend to them; `compiled_kernels.py` compiles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_kv.cpu_ops.key_codes import bytes_of_block
from hetero_kv.gpu_ops.estimated_masses import BlockMasses
from hetero_kv.gpu_ops.slot_formats import GROUP_BYTES
from hetero_kv.gpu_ops.token_attention import PARTS, KeyOffsets, Parts
from hetero_kv.gpu_ops.token_choice import Target
from hetero_kv.gpu_ops.token_slots import TokenSlots
from hetero_kv.gpu_ops.triton_kernels import (
    estimated_masses,
    stored_keys,
    token_attention,
    token_choice,
    token_slots,
)
from tests.gpu_ops.compiled_numbers import BRAIN, DIM, HALF, SINGLE, at_addresses, zeros

# Of 128K tokens in blocks of 16, and their candidates.
CAPACITY, PLACES = 8192, 512


def whole(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def stored(shape: tuple[int, ...], dim: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Vectors in room of a shape; with bits as groups of bytes."""
    return whole(*shape, dim // 32 * GROUP_BYTES[bits], dtype=torch.uint8) if bits else zeros(*shape, dim, dtype=dtype)


def scoring_means(dtype: torch.dtype, count: int, bits: int, softcap: float | None) -> Callable[[], Any]:
    q = zeros(1, 1, 32, DIM, dtype=dtype).transpose(1, 2)
    vectors = stored((CAPACITY, 1, 8, count), DIM, bits, HALF).movedim(0, 2)
    number = torch.zeros(3, dtype=torch.int64)[2:]
    return lambda: estimated_masses.score_means(q, vectors, number, 16, 0.1, softcap)


def scoring_codes(dtype: torch.dtype, size: int, dim: int, is_listed: bool, softcap: float | None) -> Callable[[], Any]:
    q = zeros(1, 1, 32, dim, dtype=dtype).transpose(1, 2)
    codes = whole(CAPACITY, 1, 8, bytes_of_block(size, dim), dtype=torch.uint8).movedim(0, 2)
    known = BlockMasses(*(zeros(1, 8, 4, CAPACITY) for _ in range(4)))
    listed, scores = whole(1, 8, PLACES), zeros(1, 8, 4, PLACES * size)
    lists = (listed, scores) if is_listed else (None, None)
    number = torch.zeros(3, dtype=torch.int64)[2:]
    return lambda: estimated_masses.score_codes(q, codes, lists[0], number, size, known, 0.1, softcap, lists[1])


def scoring_stored_keys(
    dtype: torch.dtype, size: int, bits: int, is_listed: bool, softcap: float | None
) -> Callable[[], Any]:
    q = zeros(1, 1, 32, DIM, dtype=dtype).transpose(1, 2)
    keys = stored((CAPACITY, 1, 8, size), DIM, bits, HALF).movedim(0, 2)
    offsets = zeros(CAPACITY, 1, 8, 1, DIM, dtype=HALF).movedim(0, 2) if bits == 4 else None
    known = BlockMasses(*(zeros(1, 8, 4, CAPACITY) for _ in range(4)))
    listed, scores = (whole(1, 8, PLACES), zeros(1, 8, 4, PLACES * size)) if is_listed else (None, None)
    number = torch.zeros(3, dtype=torch.int64)[2:]
    return lambda: stored_keys.score_stored_keys(q, keys, offsets, listed, number, known, 0.1, softcap, scores)


def totalling() -> None:
    masses, outside = zeros(1, 8, 4, CAPACITY), zeros(1, 8, PARTS, 4)[:, :, :16]
    estimated_masses.log_totals(masses, masses, outside, torch.zeros(3, dtype=torch.int64)[2:])


def sharing() -> None:
    estimated_masses.mean_shares(zeros(1, 8, 4, CAPACITY), zeros(1, 8, 4, CAPACITY), zeros(3, 1, 8, 4))


def choosing(entries: int, unit: int, has_target: bool) -> Callable[[], Any]:
    keys, totals, number = zeros(1, 8, entries), zeros(3, 1, 8, 4), torch.zeros(3, dtype=torch.int64)[2:]
    is_listed = unit > 1
    among = (whole(1, 8, entries // unit), whole(1, 8)) if is_listed else (None, None)
    taken = whole(1, 8, entries, dtype=torch.int8) if is_listed else None
    target = Target(0.9 if has_target else 0.0, 64, 4096, 1 if is_listed else 2, 512)
    to = whole(1, 8, 8192 if is_listed else PLACES), whole(1, 8)
    return lambda: token_choice.choose(keys, keys, totals, number, unit, *among, target, *to, taken)


def leaving(size: int) -> Callable[[], Any]:
    scores, taken = zeros(1, 8, 4, PLACES * size), whole(1, 8, PLACES * size, dtype=torch.int8)
    masses, places = zeros(1, 8, 4, CAPACITY), whole(1, 8, PLACES)
    return lambda: token_choice.leave(scores, taken, places, zeros(3, 1, 8, 4), masses, masses, whole(1, 8, 4))


def placing_tokens() -> None:
    slots = TokenSlots.empty(1, 8, 8192, 131_072, torch.device("cpu"))
    token_slots.place(slots, whole(1, 8, 8192), whole(1, 8), whole(8))


def fetching_tokens(kind: torch.dtype, dtype: torch.dtype) -> Callable[[], Any]:
    pool, out = torch.zeros(9, 8, 16, 136, dtype=kind), torch.zeros(1, 8, 100, 136, dtype=dtype)
    lists = whole(1, 500), whole(1, 8, 100), whole(1, 8, 100), whole(8)
    return lambda: token_slots.fetch(pool, *lists, out)


def parts(dim: int) -> Parts:
    return Parts(zeros(1, 8, PARTS, 4, dim), zeros(1, 8, PARTS, 4))


def attending_to_tokens(
    dtype: torch.dtype, dim: int, bits: int, softcap: float | None, k_bits: int = 0
) -> Callable[[], Any]:
    q = zeros(1, 1, 32, dim, dtype=dtype).transpose(1, 2)
    keys, values = (stored((1, 8, 4096), dim, each, dtype) for each in (k_bits, bits))
    lists, to, offsets = (whole(1, 8, 4096), whole(1, 8)), parts(dim), None
    if k_bits == 4:
        offsets = KeyOffsets(zeros(1, CAPACITY, 8, 1, dim, dtype=HALF).movedim(1, 2), lists[0], 16)
    return lambda: token_attention.attend_to_tokens(q, keys, values, *lists, 0.1, softcap, to, offsets)


def attending_to_rest(dim: int, bits: int) -> Callable[[], Any]:
    masses, means = zeros(1, 8, 4, CAPACITY), stored((CAPACITY, 1, 8), dim, bits, HALF).movedim(0, 2)
    number, to = torch.zeros(3, dtype=torch.int64)[2:], parts(dim)
    return lambda: token_attention.attend_to_rest(masses, masses, means, number, to)


def summing() -> None:
    token_attention.sum_masses(parts(DIM).lse, zeros(1, 8, 32, 4), zeros(8))


def of_rows() -> dict[str, Callable[[], Any]]:
    """Launches for rows that are found by addresses: of each kernel that takes them."""
    q, number = zeros(4, 1, 32, DIM, dtype=BRAIN).transpose(1, 2), torch.zeros(4, 3, dtype=torch.int64)[:, 2]
    vectors = at_addresses(stored((4, CAPACITY, 8, 2), DIM, 8, HALF).movedim(1, 2))
    codes = at_addresses(whole(4, CAPACITY, 8, bytes_of_block(16, DIM), dtype=torch.uint8).movedim(1, 2))
    known = BlockMasses(*(zeros(4, 8, 4, CAPACITY) for _ in range(4)))
    sizes = (8, 8192), (8, 131_072), (8,)
    slots = TokenSlots(*(at_addresses(whole(4, *size)) for size in sizes))
    lists, to = (whole(4, 8, 8192), whole(4, 8)), Parts(zeros(4, 8, PARTS, 4, DIM), zeros(4, 8, PARTS, 4))
    keys, values = at_addresses(zeros(4, 8, 8192, DIM, dtype=BRAIN)), at_addresses(stored((4, 8, 8192), DIM, 8, HALF))
    pool, table = whole(9, 8, 16, DIM // 32 * GROUP_BYTES[8], dtype=torch.uint8), whole(4, 500)
    means, masses = at_addresses(stored((4, CAPACITY, 8), DIM, 8, HALF).movedim(1, 2)), known.masses
    missing = whole(4, 8, 8192), whole(4, 8, 8192), whole(32)
    four_bits = at_addresses(stored((4, CAPACITY, 8, 16), DIM, 4, HALF).movedim(1, 2))
    offsets = at_addresses(zeros(4, CAPACITY, 8, 1, DIM, dtype=HALF).movedim(1, 2))
    return {
        "score keys in Q4_0 at addresses": lambda: stored_keys.score_stored_keys(
            q, four_bits, offsets, whole(4, 8, PLACES), number, known, 0.1, None, zeros(4, 8, 4, PLACES * 16)
        ),
        "score means at addresses": lambda: estimated_masses.score_means(q, vectors, number, 16, 0.1, None),
        "score coarse keys at addresses": lambda: estimated_masses.score_codes(
            q, codes, whole(4, 8, PLACES), number, 16, known, 0.1, None, zeros(4, 8, 4, PLACES * 16)
        ),
        "place tokens at addresses": lambda: token_slots.place(slots, *lists, whole(32)),
        "fetch tokens to addresses": lambda: token_slots.fetch(pool, table, *missing, values),
        "attend to tokens at addresses": lambda: token_attention.attend_to_tokens(
            q, keys, values, *lists, 0.1, None, to
        ),
        "attend to tokens of differences at addresses": lambda: token_attention.attend_to_tokens(
            q, values, values, *lists, 0.1, None, to, KeyOffsets(offsets, lists[0], 16)
        ),
        "attend to mean values at addresses": lambda: token_attention.attend_to_rest(masses, masses, means, number, to),
    }


#: One of every kernel, and others.
LAUNCHES: dict[str, Callable[[], Any]] = {
    "score means in Q8_0, bfloat16": scoring_means(BRAIN, 2, 8, None),
    "score coarse keys, bfloat16": scoring_codes(BRAIN, 16, DIM, False, None),
    "score keys in Q4_0, bfloat16": scoring_stored_keys(BRAIN, 16, 4, False, None),
    "add up masses": totalling,
    "share attention": sharing,
    "choose tokens of candidates": choosing(PLACES * 32, 16, True),
    "leave tokens": leaving(16),
    "place tokens": placing_tokens,
    "fetch tokens, float16 for bfloat16": fetching_tokens(HALF, BRAIN),
    "attend to tokens, bfloat16": attending_to_tokens(BRAIN, DIM, 0, None),
    "attend to mean values in Q8_0": attending_to_rest(DIM, 8),
    "sum up masses": summing,
    # Further launches of these kernels.
    "score means, float16, soft-capped": scoring_means(HALF, 1, 0, 30.0),
    "score coarse keys, float32, of candidates": scoring_codes(SINGLE, 32, 256, True, 30.0),
    "score coarse keys, float16, of large blocks": scoring_codes(HALF, 256, DIM, True, None),
    "score keys in Q4_0, float16, of large blocks": scoring_stored_keys(HALF, 256, 4, True, 30.0),
    "score keys in Q8_0, float32, of candidates": scoring_stored_keys(SINGLE, 32, 8, True, None),
    "choose blocks": choosing(CAPACITY, 1, True),
    "choose as many tokens as fit": choosing(4096, 16, False),
    "leave tokens of large blocks": leaving(128),
    "fetch tokens, bytes": fetching_tokens(torch.uint8, torch.uint8),
    "attend to tokens, float32, soft-capped": attending_to_tokens(SINGLE, 256, 0, 30.0),
    "attend to tokens in Q8_0, bfloat16": attending_to_tokens(BRAIN, DIM, 8, None),
    "attend to tokens in Q4_0, float16": attending_to_tokens(HALF, DIM, 4, None, k_bits=4),
    "attend to tokens in Q8_0, float32": attending_to_tokens(SINGLE, 256, 8, 30.0, k_bits=8),
    "attend to mean values": attending_to_rest(256, 0),
    **of_rows(),
}
#: Those of the latter, for the slow tests.
FURTHER = tuple(LAUNCHES)[12:]
