"""Launches of the kernels of packed weights, for `compiled_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.gpu_ops.triton_kernels import packed_weights
from tests.gpu_ops.compiled_numbers import BRAIN, HALF, SINGLE, zeros


def packed(name: str, rows: int, columns: int) -> torch.Tensor:
    return zeros(FORMATS[name].packed_bytes(rows, columns), dtype=torch.uint8)


def multiplying(name: str, dtype: torch.dtype, count: int) -> Callable[[], Any]:
    x, data, out = zeros(count, 4096, dtype=dtype), packed(name, 1024, 4096), zeros(count, 1024, dtype=dtype)
    return lambda: packed_weights.multiply(x, data, name, out[0], out)


def multiplying_chosen(name: str, dtype: torch.dtype) -> Callable[[], Any]:
    x, chosen, out = zeros(8, 4096, dtype=dtype), torch.zeros(8, dtype=torch.int64), zeros(8, 1024, dtype=dtype)
    experts = packed(name, 1024, 4096).expand(3, -1).contiguous()
    return lambda: packed_weights.multiply_chosen(x, experts, name, chosen, out)


def unpacking(name: str, dtype: torch.dtype) -> Callable[[], Any]:
    data, out = packed(name, 1024, 4096), zeros(512, 4096, dtype=dtype)
    return lambda: packed_weights.unpack(data, name, 32, out)


def looking_up(name: str, dtype: torch.dtype) -> Callable[[], Any]:
    data, ids, out = packed(name, 1024, 4096), zeros(7, dtype=torch.int64), zeros(7, 4096, dtype=dtype)
    return lambda: packed_weights.rows_of(data, name, 1024, ids, out)


LAUNCHES: dict[str, Callable[[], Any]] = {
    "multiply packed, Q4_K, bfloat16": multiplying("Q4_K", BRAIN, 1),
    "multiply packed, Q8_0, float16, nine rows": multiplying("Q8_0", HALF, 9),
    "multiply packed, MXFP4, float32, of chosen experts": multiplying_chosen("MXFP4", SINGLE),
    "unpack packed, Q6_K, bfloat16": unpacking("Q6_K", BRAIN),
    "rows of packed, BF16, bfloat16": looking_up("BF16", BRAIN),
}
#: Those of kernels that others launch too, for the slow tests.
FURTHER = ("multiply packed, Q8_0, float16, nine rows",)
#: Of every format, for the slow tests.
FORMS: dict[str, Callable[[], Any]] = {
    f"{kernel}, {name}": launch
    for name, layout in FORMATS.items()
    if not layout.codebook
    for kernel, launch in (
        ("multiply packed", multiplying(name, BRAIN, 4)),
        ("unpack packed", unpacking(name, HALF)),
        ("rows of packed", looking_up(name, HALF)),
    )
}
