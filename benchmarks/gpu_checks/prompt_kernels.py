"""Compares the Triton kernels of prompts, attention and its column sums, with the torch functions that define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_checks.setting import HALF, Setting
from hetero_kv.gpu_ops.column_sums import column_sums, column_sums_in_torch
from hetero_kv.gpu_ops.flash import flash_attention, flash_attention_in_torch

Case = tuple[str, Callable[[], Any], Callable[[], Any], float]
#: Soft-capping, window, and whether there are learned sinks.
_ADDITIONS: dict[str, tuple[float | None, int | None, bool]] = {
    "plain": (None, None, False),
    "soft-capped": (30.0, None, False),
    "windowed, with sinks": (None, 100, True),
}


def prompt_cases(setting: Setting, dtype: torch.dtype) -> list[Case]:
    """Cases of a chunk after earlier tokens in `dtype`: attention with each option, and its column sums."""
    heads, kv_heads, n, past, dim = (4, 2, 40, 50, 16) if setting.tiny else (32, 8, 1024, 3072, 128)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=setting.device).to(dtype)

    q, keys, values = random(1, heads, n, dim), *(random(1, kv_heads, past + n, dim) for _ in range(2))
    parts = keys[:, :, :past], values[:, :, :past], keys[:, :, past:], values[:, :, past:]
    scale, sinks = dim**-0.5, random(heads)
    # A weight in half precision is rounded before it is multiplied.
    roundings = 4.0 if dtype in HALF else 50.0
    attend = flash_attention if setting.on_gpu else flash_attention_in_torch
    cases = []
    for name, (softcap, window, has_sinks) in _ADDITIONS.items():
        arguments = q, *parts, scale, softcap, window, sinks if has_sinks else None
        kernel = _first(attend, arguments)
        cases.append((f"attention of a prompt, {name}", kernel, _first(flash_attention_in_torch, arguments), roundings))
    lse = flash_attention_in_torch(q, *parts, scale)[1]
    cases.append(
        (
            "what keys receive of a prompt's attention",
            lambda: column_sums(q, lse, keys, scale),
            lambda: column_sums_in_torch(q, lse, keys, scale, None, None, False, False, past),
            # Both compute in float32, for inputs of either dtype; these are sums of a thousand exponentials.
            4.0 if dtype in HALF else 200.0,
        )
    )
    return cases


def _first(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*arguments)[0]
