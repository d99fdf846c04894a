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

from gpu_ops.column_sums import column_sums_in_torch
from gpu_ops.flash import flash_attention_in_torch
from gpu_ops.gather import gathered_rows_by_copy
from gpu_ops.merge import merge_attention_in_torch
from gpu_ops.rebuild import rebuilt_chunks_in_torch
from gpu_ops.rotary import RotaryLayout
from gpu_ops.triton_kernels import column_sums, flash, gather, merge, rebuild

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


def gathered(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> bool:
    stored, where = (random(*shape) * 9).to(dtype), torch.randint(0, shape[0], (count,), generator=_generator)
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
                "gathered": {
                    f"{dtype}, {shape}, {count}": gathered(dtype, shape, count)
                    for dtype in (*DTYPES, torch.uint8)
                    for shape, count in (((50, 5, 24), 9), ((7, 8, 200), 20), ((3, 1, 1), 0))
                },
            }
        )
    )
