"""Every Triton kernel against its torch function, under Triton's interpreter; prints one JSON object.

test_triton_kernels.py runs it in another process: the definition of a kernel fixes its interpreter. With the argument
`all` it computes every combination of the cases, with `pairs` every pair, else each of them.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch

from hetero_kv.gpu_ops.column_sums import column_sums_in_torch
from hetero_kv.gpu_ops.flash import flash_attention_in_torch
from hetero_kv.gpu_ops.gather import gathered_rows_by_copy
from hetero_kv.gpu_ops.merge import merge_attention_in_torch
from hetero_kv.gpu_ops.rebuild import rebuild_into_in_torch, rebuilt_chunks_in_torch
from hetero_kv.gpu_ops.resident_slots import fetch_in_torch, placed_in_torch
from hetero_kv.gpu_ops.rotary import RotaryLayout, rotate_into_in_torch, unrotate_into_in_torch
from hetero_kv.gpu_ops.triton_kernels import (
    column_sums,
    flash,
    gather,
    merge,
    rebuild,
    resident_slots,
    rotary,
    window_step,
)
from hetero_kv.gpu_ops.window_step import join_parts_in_torch, take_token_in_torch
from tests.gpu_ops.interpreted_choice import of_choice
from tests.gpu_ops.interpreted_clusters import of_clusters
from tests.gpu_ops.interpreted_entries import of_entries
from tests.gpu_ops.interpreted_numbers import DTYPES, GENERATOR, combined, difference, multiplied, random
from tests.gpu_ops.interpreted_rows import of_rows
from tests.gpu_ops.interpreted_sets import of_sets
from tests.gpu_ops.interpreted_tokens import of_tokens
from tests.support.bfloat16_products import mended

#: Halves, a part at either end, neighbours, an odd number of pairs in the middle of nowhere, and no rotation.
LAYOUTS = (
    RotaryLayout(12),
    RotaryLayout(4),
    RotaryLayout(4, offset=16),
    RotaryLayout(12, interleaved=True),
    RotaryLayout(5, offset=3, interleaved=True),
    RotaryLayout(0),
)


class Attention(NamedTuple):
    """A prompt's chunk behind `past` tokens."""

    past: int
    n: int
    own: int
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    k_dim: int = 16
    v_dim: int = 16
    softcap: float | None = None
    window: int | None = None
    has_sink: bool = False


#: Plain and with each addition; a tile that ends within the past, one that sees none of it; keys before alone.
ATTENTION = (
    Attention(40, 33, 33, batch=2, kv_heads=2, group=2, k_dim=24),
    Attention(0, 20, 20, kv_heads=2, group=2, softcap=3.0, has_sink=True),
    Attention(50, 33, 33, group=4, window=17),
    Attention(9, 70, 70, window=20, softcap=2.0),
    Attention(40, 5, 0, v_dim=32, softcap=2.0),
    Attention(30, 18, 18, group=2, window=1, has_sink=True),
)


class SelectionStatistics(NamedTuple):
    """A token in the slot of the first run's end, or of the second's, of a window of 90 slots."""

    runs: tuple[int, int, int, int]
    slot: int
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    k_dim: int = 16
    v_dim: int = 16
    softcap: float | None = None


#: Parts of several tiles, of one, and none; a run that is empty; a token at the end of either run, and the only one.
TAKEN = (
    SelectionStatistics((0, 40, 60, 30), 39, batch=2, kv_heads=2, group=3, k_dim=24, v_dim=40),
    SelectionStatistics((5, 70, 0, 0), 74, kv_heads=2, group=2, softcap=3.0),
    SelectionStatistics((0, 30, 80, 10), 89, group=17, k_dim=200),
    SelectionStatistics((0, 1, 0, 0), 0, batch=2, k_dim=200, v_dim=8),
)


#: A chunk's queries, few of them, ones of which the first see none of the keys, and each addition.
SUMS: tuple[dict[str, Any], ...] = (
    {"n": 40, "length": 40, "past": 0, "squared": True},
    {"n": 5, "length": 50, "past": 45, "weights": True, "softcap": 2.0},
    {"n": 40, "length": 50, "past": -9, "group_max": True, "weights": True},
)

#: Of queries and keys.
SUMMED = (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float16)
#: Of slots and of stored values.
BROUGHT = [(dtype, stored) for dtype in DTYPES for stored in dict.fromkeys((dtype, torch.float16))]


def merged(dtype: torch.dtype, other: torch.dtype, shape: tuple[int, ...]) -> float:
    batch, heads, tokens, dim = shape
    # Not contiguous, as flash attention gives its output.
    a, b = random(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2), random(*shape, dtype=other)
    lse_a, lse_b = random(*shape[:3]) * 5, random(*shape[:3]) * 5
    lse_a[0, 0, 0] = lse_b[0, 0, 0] = lse_a[-1, -1, -1] = float("-inf")
    pairs = zip(merge.merge_attention(a, lse_a, b, lse_b), merge_attention_in_torch(a, lse_a, b, lse_b), strict=True)
    return max(difference(actual, expected) for actual, expected in pairs)


def rebuilt(dtype: torch.dtype, layout: RotaryLayout, chunk_size: int, rank: int, count: int) -> float:
    # A view with room behind, as a tensor that grows has.
    coefficients, basis = random(2, 150, rank, dtype=dtype)[:, :120], random(2, 2, rank, 24, dtype=dtype)
    cos, sin = random(130, layout.pairs, dtype=dtype), random(130, layout.pairs, dtype=dtype)
    chunks = torch.randint(0, 120 // chunk_size, (2, 2, count), generator=GENERATOR)
    arguments = coefficients, basis, cos, sin, layout, chunks, chunk_size
    return difference(rebuild.rebuilt_chunks(*arguments), rebuilt_chunks_in_torch(*arguments))


def rotated(dtype: torch.dtype, layout: RotaryLayout, tokens: int) -> float:
    """Queries as a model projects them, and into a part of a larger buffer."""
    x, out = random(2, tokens, 2, 24, dtype=dtype).transpose(1, 2), random(2, 2, tokens + 4, 24, dtype=dtype)
    arguments = x, random(tokens, layout.pairs, dtype=dtype), random(tokens, layout.pairs), layout
    found, expected = out.clone(), out.clone()
    rotary.rotate_into(*arguments, found[:, :, 1:-3])
    rotate_into_in_torch(*arguments, expected[:, :, 1:-3])
    back, plain = out.clone(), out.clone()
    rotary.rotate_into(*arguments, back[:, :, 1:-3], inverse=True)
    unrotate_into_in_torch(*arguments, plain[:, :, 1:-3])
    return max(difference(found, expected), difference(back, plain))


def slots(resident: int, count: int, chunks: int) -> tuple[torch.Tensor, ...]:
    """What two sequences of two heads hold, of which the last slots are empty, and what they choose."""
    orders = [torch.rand(2, 2, chunks, generator=GENERATOR).argsort(dim=2)[..., :count].contiguous() for _ in range(2)]
    orders[0][..., resident:] = -1
    return orders[0], orders[1]


def placed(resident: int, count: int, chunks: int) -> bool:
    arguments, missed, expected_missed = (
        slots(resident, count, chunks),
        *(torch.zeros(4, dtype=torch.int32) for _ in range(2)),
    )
    pairs = zip(resident_slots.place(*arguments, missed), placed_in_torch(*arguments, expected_missed), strict=True)
    return torch.equal(missed, expected_missed) and all(torch.equal(actual, expected) for actual, expected in pairs)


def brought(dtype: torch.dtype, stored: torch.dtype, count: int) -> float:
    """Keys rebuilt and values fetched into slots behind others, which stay."""
    _, misses, into = placed_in_torch(*slots(count // 2, count, 20), torch.empty(4, dtype=torch.int32))
    values, table = random(45, 2, 5, 24).to(stored), torch.randperm(45, generator=GENERATOR)[:40].view(2, 20).int()
    coefficients, basis = random(2, 100, 40, dtype=dtype), random(2, 2, 40, 24, dtype=dtype)
    cos, sin = random(130, 12, dtype=dtype), random(130, 12, dtype=dtype)
    before = random(2, 2, count + 3, 5, 24, dtype=dtype)
    into_keys = coefficients, basis, cos, sin, RotaryLayout(12), misses, into
    found = [before.clone() for _ in range(4)]
    rebuild.rebuild_into(*into_keys, found[0][:, :, 2:-1])
    rebuild_into_in_torch(*into_keys, found[1][:, :, 2:-1])
    resident_slots.fetch(values, table, misses, into, found[2][:, :, 2:-1])
    fetch_in_torch(values, table, misses, into, found[3][:, :, 2:-1])
    return max(difference(*found[:2]), difference(*found[2:]))


def gathered(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> bool:
    stored, where = (random(*shape) * 9).to(dtype), torch.randint(0, shape[0], (count,), generator=GENERATOR)
    out = torch.empty(count, *shape[1:], dtype=dtype)
    gather.gathered_rows(stored, where, out)
    return torch.equal(out, gathered_rows_by_copy(stored, where, stored))


def attended(dtype: torch.dtype, case: Attention) -> tuple[float, float]:
    """Of the output and of the log-sum-exp, of tensors that are not contiguous."""
    heads = case.kv_heads * case.group
    q = random(case.batch, case.n, heads, case.k_dim, dtype=dtype).transpose(1, 2)
    past_k = random(case.batch, case.kv_heads, case.past + 9, case.k_dim, dtype=dtype)[:, :, : case.past]
    past_v = random(case.batch, case.past, case.kv_heads, case.v_dim, dtype=dtype).transpose(1, 2)
    k = random(case.batch, case.kv_heads, case.own, case.k_dim, dtype=dtype)
    v = random(case.batch, case.kv_heads, case.own, case.v_dim, dtype=dtype)
    sink = random(heads, dtype=dtype) * 3 if case.has_sink else None
    arguments = q, past_k, past_v, k, v, 0.3, case.softcap, case.window, sink
    pairs = zip(flash.flash_attention(*arguments), flash_attention_in_torch(*arguments), strict=True)
    out, lse = (difference(actual, expected) for actual, expected in pairs)
    return out, lse


def taken(dtype: torch.dtype, case: SelectionStatistics, other: float) -> tuple[float, float, bool]:
    """Of the window's attention joined with another of about the log-sum-exp `other`, of log-sum-exps, and whether all
    else is the same."""
    batch, kv_heads, heads = case.batch, case.kv_heads, case.kv_heads * case.group
    # As models scale: where scores are large, float32 rounds them by more than the limits allow.
    scale = case.k_dim**-0.5
    q = random(batch, 1, heads, case.k_dim, dtype=dtype).transpose(1, 2)
    k, v = (random(batch, 1, kv_heads, dim, dtype=dtype).transpose(1, 2) for dim in (case.k_dim, case.v_dim))
    windows = [random(batch, kv_heads, 90, dim, dtype=dtype) for dim in (case.k_dim, case.v_dim)]
    elsewhere = random(batch, heads, 1, case.v_dim), random(batch, kv_heads, case.group) + other
    results, left = [], []
    for take, join, splits in (
        (window_step.take_token, window_step.join_parts, 2),
        (take_token_in_torch, join_parts_in_torch, 3),
    ):
        keys, values = (part.clone() for part in windows)
        lse = torch.full((batch, kv_heads, splits, case.group), torch.nan)
        sent = *(torch.full(part.shape, torch.nan) for part in (q, k, v)), lse
        parts = take(q, k, v, keys, values, case.slot, case.runs, scale, case.softcap, sent, splits)
        out, whole = torch.empty(batch, heads, 1, case.v_dim, dtype=dtype), torch.empty(batch, heads)
        join(parts, lse, *elsewhere, out, whole)
        results.append((out, whole, lse.logsumexp(dim=2)))
        left.append((keys, values, *sent[:3]))
    out_apart, *lse_apart = (difference(actual, expected) for actual, expected in zip(*results, strict=True))
    is_same = all(torch.equal(actual, expected) for actual, expected in zip(*left, strict=True))
    return out_apart, max(lse_apart), is_same


def summed(dtype: torch.dtype, key_dtype: torch.dtype, n: int, length: int, past: int, **more: Any) -> float:
    """Of queries the last of which stand behind some of the keys, or before."""
    q = random(2, n, 4, 24, dtype=dtype).transpose(1, 2)
    keys = random(2, 2, length + 5, 24, dtype=key_dtype)[:, :, :length]
    settings = {"softcap": None, "weights": None, "squared": False, "group_max": False, **more}
    if settings["weights"]:
        settings["weights"] = random(n).abs()
    arguments = q, random(2, 4, n) + 4, keys, 0.3
    found, expected = (
        sums(*arguments, **settings, past=past) for sums in (column_sums.column_sums, column_sums_in_torch)
    )
    # Sums of some hundred numbers.
    return difference(found, expected)


if __name__ == "__main__":
    mended()
    print(
        json.dumps(
            {
                "merged": {
                    f"{dtype}, {other}, {shape}": merged(dtype, other, shape)
                    for dtype in DTYPES
                    for other in dict.fromkeys((dtype, torch.float32))
                    for shape in ((1, 1, 1, 1), (2, 3, 9, 24), (1, 2, 40, 128))
                },
                "attended": {
                    f"{dtype}, {case}": attended(dtype, case) for dtype, case in multiplied(DTYPES, ATTENTION)
                },
                "taken": {
                    f"{dtype}, {case}, {other}": taken(dtype, case, other)
                    for dtype, case, other in combined(DTYPES, TAKEN, (0.0, -200.0, float("-inf")))
                },
                "summed": {
                    f"{dtype}, {key_dtype}, {case}": summed(dtype, key_dtype, **case)
                    for (dtype, key_dtype), case in multiplied(SUMMED, SUMS)
                },
                "rebuilt": {
                    f"{dtype}, {layout}, {size}, {rank}, {count}": rebuilt(dtype, layout, size, rank, count)
                    for dtype, layout, (size, rank, count) in combined(DTYPES, LAYOUTS, ((8, 20, 1), (5, 40, 9)))
                },
                "rotated": {
                    f"{dtype}, {layout}, {tokens}": rotated(dtype, layout, tokens)
                    for dtype, layout, tokens in combined(DTYPES, LAYOUTS, (1, 150))
                },
                "placed": {
                    f"{resident} of {count}, {chunks}": placed(resident, count, chunks)
                    for resident, count, chunks in ((0, 1, 4), (4, 4, 5), (9, 20, 30), (70, 70, 90), (140, 140, 150))
                },
                "brought": {
                    f"{dtype}, {stored}, {count}": brought(dtype, stored, count)
                    for (dtype, stored), count in multiplied(BROUGHT, (1, 5, 9))
                },
                **of_entries(),
                **of_choice(),
                **of_sets(),
                **of_tokens(),
                **of_clusters(),
                **of_rows(),
                "gathered": {
                    f"{dtype}, {shape}, {count}": gathered(dtype, shape, count)
                    for dtype in (*DTYPES, torch.uint8)
                    for shape, count in (((50, 5, 24), 9), ((7, 8, 200), 20), ((3, 1, 1), 0))
                },
            }
        )
    )
