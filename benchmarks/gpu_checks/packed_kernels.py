"""Compares the Triton kernels of packed weights, in every format, with the torch functions that define them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu_checks.setting import Setting
from hetero_kv.cpu_ops.codebooks import CODEBOOKS
from hetero_kv.cpu_ops.weight_formats import FORMATS, TILE
from hetero_kv.gpu_ops import packed_weights

Case = tuple[str, Callable[[], Any], Callable[[], Any], float]
_DTYPE = torch.bfloat16


def random_packed(name: str, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """A packed matrix of random codes with finite scales, made on the device; rows fill whole tiles."""
    layout = FORMATS[name]
    tiles, blocks = -(-rows // TILE), columns // layout.columns
    if layout.number:
        numbers = torch.randn(tiles * TILE * columns, device=device) * 0.02
        return numbers.to(getattr(torch, layout.number)).view(torch.uint8)
    records = torch.randint(0, 256, (tiles, blocks, layout.record_bytes), dtype=torch.uint8, device=device)
    if layout.bytes_as:
        records[..., : layout.scale_bytes].random_(118, 124)
        return records.flatten()
    halves = layout.head_bytes if layout.two_levels else layout.scale_bytes
    small = torch.rand(tiles, blocks, halves // 2, device=device) * 1e-4
    records[..., :halves].copy_(small.half().view(torch.uint8))
    return records.flatten()


def formats_without_grids() -> tuple[str, ...]:
    """The formats with a codebook, if the package gguf, which has their grids, is not installed."""
    return () if find_spec("gguf") else tuple(CODEBOOKS)


def packed_cases(setting: Setting) -> list[Case]:
    """Cases of every format: a product with one row, with several, the unpacked matrix, and looked-up rows.

    Without those of `formats_without_grids`.
    """
    rows, columns = (40, 512) if setting.tiny else (4096, 4096)
    cases: list[Case] = []
    for name in (each for each in FORMATS if each not in formats_without_grids()):
        data = random_packed(name, rows, columns, setting.device)
        x = torch.randn(9, columns, device=setting.device).to(_DTYPE)
        ids = torch.arange(0, rows, 3, device=setting.device)
        out = torch.empty(rows, columns, dtype=_DTYPE, device=setting.device)
        for count, said in ((1, "a row"), (9, "nine rows")):
            reference = partial(packed_weights.multiply_in_torch, x[:count], data, name, rows, None)
            has_kernels = packed_weights.has_kernels(data, name)
            kernel = partial(packed_weights.multiply, x[:count], data, name, rows) if has_kernels else reference
            cases.append((f"{said} times packed weights, {name}", kernel, reference, 1.0))
        cases.append((f"packed weights unpacked, {name}", *_unpacking(data, name, out), 0.0))
        cases.append((f"rows of packed weights, {name}", *_looking_up(data, name, out, ids), 0.0))
    return cases


def _unpacking(data: torch.Tensor, name: str, out: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def kernel() -> torch.Tensor:
        packed_weights.unpack_into(out, data, name)
        return out

    return kernel, lambda: packed_weights.unpacked_in_torch(data, name, *out.shape).to(out.dtype)


def _looking_up(
    data: torch.Tensor, name: str, like: torch.Tensor, ids: torch.Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    rows, columns = like.shape
    return (
        lambda: packed_weights.rows_of(data, name, rows, columns, ids, like.dtype),
        lambda: packed_weights.rows_in_torch(data, name, rows, columns, ids).to(like.dtype),
    )
