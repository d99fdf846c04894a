"""Compares the Triton kernels of prompts with the torch functions that define them: attention, dense and sparse, and
what is read of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_checks.setting import HALF, Setting
from hetero_kv.gpu_ops.column_sums import column_sums, column_sums_in_torch
from hetero_kv.gpu_ops.flash import flash_attention, flash_attention_in_torch
from hetero_kv.gpu_ops.key_sets import KeySets
from hetero_kv.gpu_ops.query_scores import (
    SAMPLED_QUERIES,
    attention_by_line,
    last_places,
    line_sums_in_torch,
    logsumexp_in_torch,
    sampled_places,
    unseen_attention,
    unseen_logsumexp_in_torch,
)
from hetero_kv.gpu_ops.set_attention import set_attention, set_attention_in_torch

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
    return [*cases, *_sparse_cases(setting, q, parts, sinks)]


def _sparse_cases(
    setting: Setting, q: torch.Tensor, parts: tuple[torch.Tensor, ...], sinks: torch.Tensor
) -> list[Case]:
    """Cases of a sparse prefill: attention to sets of keys, and the scores by which keys are chosen."""
    (past_k, past_v, k, v), rules = parts, (q.shape[3] ** -0.5, None)
    (batch, heads, n), past = q.shape[:3], past_k.shape[2]
    tokens, distances = (torch.rand(batch, heads, past + n, device=q.device) < share for share in (0.05, 0.01))
    distances[..., 0] = True
    blocks = torch.rand(batch, heads, -(-n // 64), -(-(past + n) // 64), device=q.device).argsort(dim=3).int()[..., :3]
    counts = torch.full(blocks.shape[:3], blocks.shape[3], dtype=torch.int32, device=q.device)
    sets = KeySets.of(tokens, distances, blocks, counts, past, n)
    roundings = 4.0 if q.dtype in HALF else 50.0
    arguments = q, past_k, past_v, k, v, sets, *rules, sinks
    lasts, samples = last_places(n, q.device), sampled_places(n, q.device)

    def lines() -> torch.Tensor:
        lse = logsumexp_in_torch(q, past_k, k, lasts, past, *rules)
        return torch.stack(line_sums_in_torch(q, past_k, k, lse, past, *rules))

    def unseen() -> torch.Tensor:
        lse, by_block = unseen_logsumexp_in_torch(q, past_k, k, samples, sets, *rules)
        return (by_block - lse[:, :, None]).unflatten(3, (-1, SAMPLED_QUERIES)).amax(dim=4).transpose(2, 3).exp()

    def lines_by_kernels() -> torch.Tensor:
        return torch.stack(attention_by_line(q, past_k, k, past, *rules))

    return [
        (
            "sparse attention of a prompt, with sinks",
            _first(set_attention if setting.on_gpu else set_attention_in_torch, arguments),
            _first(set_attention_in_torch, arguments),
            roundings,
        ),
        ("attention by token and distance", lines_by_kernels if setting.on_gpu else lines, lines, 4 * roundings),
        (
            "attention outside the lines",
            (lambda: unseen_attention(q, past_k, k, sets, *rules).exp()) if setting.on_gpu else unseen,
            unseen,
            4 * roundings,
        ),
    ]


def _first(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*arguments)[0]
