"""Every Triton kernel against the torch function that defines it, under Triton's interpreter; prints one line each.

Run by test_triton_kernels.py in a process of its own: the interpreter is chosen when kernels are defined, and for good.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from gpu_ops.gather import gathered_rows_by_copy
from gpu_ops.merge import merge_attention_in_torch
from gpu_ops.rebuild import rebuilt_chunks_in_torch
from gpu_ops.rotary import RotaryLayout
from gpu_ops.triton_kernels import gather, merge, rebuild

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


_generator = torch.Generator().manual_seed(0)

if __name__ == "__main__":
    print(
        json.dumps(
            {
                "merged": {
                    f"{dtype}, {other}, {shape}": merged(dtype, other, shape)
                    for dtype in DTYPES
                    for other in (dtype, torch.float32)
                    for shape in ((1, 1, 1, 1), (2, 3, 9, 24), (1, 2, 40, 128))
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
