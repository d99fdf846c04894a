"""Every Triton kernel against the torch function that defines it, under Triton's interpreter; prints one line each.

Run by test_triton_kernels.py in a process of its own: the interpreter is chosen when kernels are defined, and for good.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch
from bfloat16_products import mended

from gpu_ops.cached_entries import all_but_lowest_in_torch, append_token_in_torch, keep_in_torch
from gpu_ops.column_sums import column_sums_in_torch
from gpu_ops.flash import flash_attention_in_torch
from gpu_ops.gather import gathered_rows_by_copy
from gpu_ops.merge import merge_attention_in_torch
from gpu_ops.rebuild import rebuild_into_in_torch, rebuilt_chunks_in_torch
from gpu_ops.resident_slots import fetch_in_torch, placed_in_torch
from gpu_ops.rotary import RotaryLayout
from gpu_ops.triton_kernels import cached_entries, column_sums, flash, gather, merge, rebuild, resident_slots

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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
    Attention(70, 37, 37, batch=2, kv_heads=2, group=3, k_dim=24),
    Attention(0, 20, 20, kv_heads=2, group=2, softcap=3.0, has_sink=True),
    Attention(50, 33, 33, group=4, window=17),
    Attention(9, 90, 90, window=20, softcap=2.0),
    Attention(40, 5, 0, v_dim=32, softcap=2.0),
    Attention(30, 18, 18, group=2, window=1, has_sink=True),
)


#: A chunk's queries, few of them, ones of which the first see none of the keys, and each addition.
SUMS: tuple[dict[str, Any], ...] = (
    {"n": 70, "length": 70, "past": 0, "squared": True},
    {"n": 5, "length": 90, "past": 85, "weights": True, "softcap": 2.0},
    {"n": 40, "length": 50, "past": -9, "group_max": True, "weights": True},
)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator).to(dtype)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference relative to the largest number, in units of the dtype's precision; the shapes agree."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    # The interpreter cuts numbers off to bfloat16, a GPU rounds them.
    apart = (actual.double() - expected.double()).masked_fill(actual == expected, 0.0).abs().max()
    largest = expected.double().masked_fill(expected.isinf(), 0.0).abs().max()
    return float(apart / largest / torch.finfo(actual.dtype).eps) if apart else 0.0


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
    coefficients, basis = random(2, 150, rank, dtype=dtype)[:, :120], random(2, 3, rank, 24, dtype=dtype)
    cos, sin = random(130, layout.pairs, dtype=dtype), random(130, layout.pairs, dtype=dtype)
    chunks = torch.randint(0, 120 // chunk_size, (2, 3, count), generator=_generator)
    arguments = coefficients, basis, cos, sin, layout, chunks, chunk_size
    return difference(rebuild.rebuilt_chunks(*arguments), rebuilt_chunks_in_torch(*arguments))


def slots(held: int, count: int, chunks: int) -> tuple[torch.Tensor, ...]:
    """What two sequences of three heads hold, of which the last slots are empty, and what they choose."""
    orders = [torch.rand(2, 3, chunks, generator=_generator).argsort(dim=2)[..., :count].contiguous() for _ in range(2)]
    orders[0][..., held:] = -1
    return orders[0], orders[1]


def placed(held: int, count: int, chunks: int) -> bool:
    given, missed, expected_missed = slots(held, count, chunks), *(torch.zeros(6, dtype=torch.int32) for _ in range(2))
    pairs = zip(resident_slots.place(*given, missed), placed_in_torch(*given, expected_missed), strict=True)
    return torch.equal(missed, expected_missed) and all(torch.equal(actual, expected) for actual, expected in pairs)


def brought(dtype: torch.dtype, stored: torch.dtype, count: int) -> float:
    """Keys rebuilt and values fetched into slots behind others, which stay."""
    _, misses, into = placed_in_torch(*slots(count // 2, count, 20), torch.empty(6, dtype=torch.int32))
    values, table = random(45, 3, 5, 24).to(stored), torch.randperm(45, generator=_generator)[:40].view(2, 20).int()
    coefficients, basis = random(2, 100, 40, dtype=dtype), random(2, 3, 40, 24, dtype=dtype)
    cos, sin = random(130, 12, dtype=dtype), random(130, 12, dtype=dtype)
    before = random(2, 3, count + 3, 5, 24, dtype=dtype)
    into_keys = coefficients, basis, cos, sin, RotaryLayout(12), misses, into
    found = [before.clone() for _ in range(4)]
    rebuild.rebuild_into(*into_keys, found[0][:, :, 2:-1])
    rebuild_into_in_torch(*into_keys, found[1][:, :, 2:-1])
    resident_slots.fetch(values, table, misses, into, found[2][:, :, 2:-1])
    fetch_in_torch(values, table, misses, into, found[3][:, :, 2:-1])
    return max(difference(*found[:2]), difference(*found[2:]))


def gathered(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> bool:
    stored, where = (random(*shape) * 9).to(dtype), torch.randint(0, shape[0], (count,), generator=_generator)
    out = torch.empty(count, *shape[1:], dtype=dtype)
    gather.gathered_rows(stored, where, out)
    return torch.equal(out, gathered_rows_by_copy(stored, where, stored))


def room(dtype: torch.dtype, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory of entries of two sequences with three heads."""
    keys, values = random(2, 3, capacity, 24, dtype=dtype), random(2, 3, capacity, 17, dtype=dtype)
    return keys, values, torch.randint(0, 900, (2, 3, capacity), generator=_generator)


def appended(dtype: torch.dtype, taken: int) -> bool:
    """A token that a model has projected, so that its heads do not lie side by side."""
    key, value = (random(2, 1, 3, dim, dtype=dtype).transpose(1, 2) for dim in (24, 17))
    found = room(dtype, 9)
    expected = [part.clone() for part in found]
    cached_entries.append_token(key, value, *found, taken, 777)
    append_token_in_torch(key, value, *expected, taken, 777)
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def lowest_left_out(kind: str, cached: int, first: int, last: int) -> bool:
    """Of scores among which are equal ones, of a list for all heads or one for each."""
    scores = torch.randint(0, 5, (2, 3, cached + 2), generator=_generator)[..., :cached]
    scores = scores << 40 if kind == "int64" else scores.float().masked_fill(scores == 4, float("inf"))
    if kind == "not a number":
        scores[:, 1, cached // 2] = float("nan")
    given = scores[:, :1] if kind == "shared" else scores
    return torch.equal(cached_entries.all_but_lowest(given, first, last), all_but_lowest_in_torch(given, first, last))


def kept(dtype: torch.dtype, count: int, lists: int, is_shared: bool) -> bool:
    """Entries with scores of which some have not come to the newest, and one is the same for all heads."""
    heads = 1 if is_shared else 3
    index = torch.rand(2 if heads == 3 else 1, heads, 80, generator=_generator).argsort(dim=2)[..., :count]
    scores = random(2, 3, 78), torch.randint(0, 1 << 60, (2, 3, 80), generator=_generator), random(2, 1, 79)
    given = room(dtype, 83), (*scores[:2], scores[2].expand(-1, 3, -1))[:lists], index.sort(dim=2).values
    found, expected = room(dtype, count + 5), room(dtype, count + 5)
    gathered = [
        cached_entries.keep(*given, found),
        keep_in_torch(*given, expected),
    ]
    entries = zip((part[:, :, :count] for part in found), (part[:, :, :count] for part in expected), strict=True)
    return all(torch.equal(*pair) for pair in (*entries, *zip(*gathered, strict=True)))


def attended(dtype: torch.dtype, case: Attention) -> tuple[float, float]:
    """Of the output and of the log-sum-exp, of tensors that are not contiguous."""
    heads = case.kv_heads * case.group
    q = random(case.batch, case.n, heads, case.k_dim, dtype=dtype).transpose(1, 2)
    past_k = random(case.batch, case.kv_heads, case.past + 9, case.k_dim, dtype=dtype)[:, :, : case.past]
    past_v = random(case.batch, case.past, case.kv_heads, case.v_dim, dtype=dtype).transpose(1, 2)
    k = random(case.batch, case.kv_heads, case.own, case.k_dim, dtype=dtype)
    v = random(case.batch, case.kv_heads, case.own, case.v_dim, dtype=dtype)
    sink = random(heads, dtype=dtype) * 3 if case.has_sink else None
    given = q, past_k, past_v, k, v, 0.3, case.softcap, case.window, sink
    pairs = zip(flash.flash_attention(*given), flash_attention_in_torch(*given), strict=True)
    out, lse = (difference(actual, expected) for actual, expected in pairs)
    return out, lse


def summed(dtype: torch.dtype, key_dtype: torch.dtype, n: int, length: int, past: int, **more: Any) -> float:
    """Of queries the last of which stand behind some of the keys, or before."""
    q = random(2, n, 6, 24, dtype=dtype).transpose(1, 2)
    keys = random(2, 2, length + 5, 24, dtype=key_dtype)[:, :, :length]
    settings = {"softcap": None, "weights": None, "squared": False, "group_max": False, **more}
    if settings["weights"]:
        settings["weights"] = random(n).abs()
    given = q, random(2, 6, n) + 4, keys, 0.3
    found, expected = (sums(*given, **settings, past=past) for sums in (column_sums.column_sums, column_sums_in_torch))
    # Sums of some hundred numbers.
    return difference(found, expected)


_generator = torch.Generator().manual_seed(0)

if __name__ == "__main__":
    mended()
    print(
        json.dumps(
            {
                "merged": {
                    f"{dtype}, {other}, {shape}": merged(dtype, other, shape)
                    for dtype in DTYPES
                    for other in (dtype, torch.float32)
                    for shape in ((1, 1, 1, 1), (2, 3, 9, 24), (1, 2, 40, 128))
                },
                "attended": {f"{dtype}, {case}": attended(dtype, case) for dtype in DTYPES for case in ATTENTION},
                "summed": {
                    f"{dtype}, {key_dtype}, {case}": summed(dtype, key_dtype, **case)
                    for dtype, key_dtype in (
                        (torch.float32,) * 2,
                        (torch.bfloat16,) * 2,
                        (torch.bfloat16, torch.float16),
                    )
                    for case in SUMS
                },
                "rebuilt": {
                    f"{dtype}, {layout}, {size}, {rank}, {count}": rebuilt(dtype, layout, size, rank, count)
                    for dtype in DTYPES
                    for layout in LAYOUTS
                    for size, rank, count in ((8, 20, 1), (5, 40, 9))
                },
                "placed": {
                    f"{held} of {count}, {chunks}": placed(held, count, chunks)
                    for held, count, chunks in ((0, 1, 4), (4, 4, 5), (9, 20, 30), (70, 70, 90), (300, 300, 310))
                },
                "brought": {
                    f"{dtype}, {stored}, {count}": brought(dtype, stored, count)
                    for dtype in DTYPES
                    for stored in (dtype, torch.float16)
                    for count in (1, 9, 18)
                },
                "appended": {f"{dtype}, {taken}": appended(dtype, taken) for dtype in DTYPES for taken in (0, 5, 8)},
                "lowest left out": {
                    f"{kind}, {cached}, {first}, {last}": lowest_left_out(kind, cached, first, last)
                    for kind in ("float32", "shared", "not a number", "int64")
                    for cached, first, last in ((1, 0, 0), (30, 0, 0), (30, 4, 9), (20, 10, 10), (2500, 3, 700))
                    if kind != "int64" or not first
                },
                "kept": {
                    f"{dtype}, {count}, {lists}, {is_shared}": kept(dtype, count, lists, is_shared)
                    for dtype in DTYPES
                    for count, lists, is_shared in ((79, 3, False), (1, 2, False), (80, 1, True), (40, 0, True))
                },
                "gathered": {
                    f"{dtype}, {shape}, {count}": gathered(dtype, shape, count)
                    for dtype in (*DTYPES, torch.uint8)
                    for shape, count in (((50, 5, 24), 9), ((7, 8, 200), 20), ((3, 1, 1), 0))
                },
            }
        )
    )
