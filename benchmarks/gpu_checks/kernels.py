"""Compares Triton kernels with the torch functions that define them, on a GPU, and times both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_checks.cluster_kernels import cluster_cases
from benchmarks.gpu_checks.entry_kernels import entry_cases
from benchmarks.gpu_checks.packed_kernels import formats_without_grids, packed_cases
from benchmarks.gpu_checks.prompt_kernels import prompt_cases
from benchmarks.gpu_checks.setting import HALF, CheckResult, Setting, in_own_pages, relative_error, synchronise
from benchmarks.gpu_checks.token_kernels import token_cases
from hetero_kv.gpu_ops.gather import gathered_rows, gathered_rows_by_copy
from hetero_kv.gpu_ops.kernel_choice import runs_triton
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.gpu_ops.merge import merge_attention, merge_attention_in_torch
from hetero_kv.gpu_ops.rebuild import rebuilt_chunks, rebuilt_chunks_in_torch
from hetero_kv.gpu_ops.rotary import RotaryLayout
from hetero_kv.gpu_ops.window_step import SPLITS, join_parts, join_parts_in_torch, take_token, take_token_in_torch

Case = tuple[str, Callable[[], Any], Callable[[], Any], float]
_REPEATS = 20
#: Limit on the time for one function: torch's are slow if a kernel replaces many passes.
_MOST_SECONDS = 0.25


def _merge_case(setting: Setting, dtype: torch.dtype) -> Case:
    shape = (1, 4, 8, 32) if setting.tiny else (1, 32, 4096, 128)
    a, b = (torch.randn(shape, device=setting.device).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(shape[:3], device=setting.device) for _ in range(2))
    arguments = a, lse_a, b, lse_b
    return (
        "merge of partial attentions",
        lambda: merge_attention(*arguments)[0],
        lambda: merge_attention_in_torch(*arguments)[0],
        # A GPU's exponentials are good to a few roundings of float32.
        1.0 if dtype in HALF else 20.0,
    )


def _rebuild_case(setting: Setting, dtype: torch.dtype, layout: RotaryLayout) -> Case:
    tokens, heads, rank, dim, count = (200, 2, 24, 32, 5) if setting.tiny else (131_072, 8, 160, 128, 256)
    tensors = [
        torch.randn(shape, device=setting.device).to(dtype)
        for shape in ((1, tokens, rank), (1, heads, rank, dim), (tokens, layout.pairs), (tokens, layout.pairs))
    ]
    chunks = torch.randint(0, tokens // 8, (1, heads, count), device=setting.device)
    arguments = *tensors, layout, chunks, 8
    return (
        f"rebuilding of chunks, {layout.pairs} {'neighbouring' if layout.interleaved else 'split'} pairs",
        lambda: rebuilt_chunks(*arguments),
        lambda: rebuilt_chunks_in_torch(*arguments),
        # Sums over the rank may come in another order.
        1.0 if dtype in HALF else 50.0,
    )


def _gather_case(setting: Setting, dtype: torch.dtype) -> Case:
    rows, count = (100, 7) if setting.tiny else (100_000, 2048)
    stored = in_own_pages(torch.randn(rows, 8, 128).to(dtype))
    mapped = MappedMemory(stored, setting.device)
    is_mapped = setting.on_gpu and mapped.reach(stored.nbytes)
    where, like = torch.randint(0, rows, (count,)), torch.empty(0, device=setting.device)
    return (
        "gathering of rows from page-locked DRAM" if is_mapped or not setting.on_gpu else "gathering: NOT page-locked",
        # The closure keeps `mapped` alive, as a cache layer does.
        lambda: gathered_rows(mapped.tensor, where, like, is_mapped=is_mapped),
        lambda: gathered_rows_by_copy(stored, where, like),
        0.0,
    )


def _token_case(setting: Setting, dtype: torch.dtype) -> Case:
    heads, kv_heads, window, dim = (4, 2, 40, 16) if setting.tiny else (32, 8, 4352, 128)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=setting.device)

    q, k, v = (random(1, count, 1, dim).to(dtype) for count in (heads, kv_heads, kv_heads))
    keys, values = (random(1, kv_heads, window, dim).to(dtype) for _ in range(2))
    # The attention sink and a ring that wraps, with the token before its turn.
    runs, slot = (0, window // 4, window // 2, window - window // 2), window // 4 - 1
    sent = (
        *(torch.empty(part.shape, device=setting.device) for part in (q, k, v)),
        random(1, kv_heads, SPLITS, heads // kv_heads),
    )
    elsewhere = random(1, heads, 1, dim), random(1, heads)
    out, lse = torch.empty_like(q), torch.empty(1, heads, device=setting.device)

    def passed(take: Callable[..., torch.Tensor], join: Callable[..., None]) -> torch.Tensor:
        parts = take(q, k, v, keys, values, slot, runs, dim**-0.5, None, sent)
        join(parts, sent[3], *elsewhere, out, lse)
        return out.clone()

    by_kernels = (take_token, join_parts) if setting.on_gpu else (take_token_in_torch, join_parts_in_torch)
    return (
        "a token's GPU window",
        lambda: passed(*by_kernels),
        lambda: passed(take_token_in_torch, join_parts_in_torch),
        # A weight in half precision is rounded before it is multiplied.
        4.0 if dtype in HALF else 50.0,
    )


def _milliseconds(setting: Setting, action: Callable[[], Any]) -> float:
    took: list[float] = []
    repeats = _REPEATS if setting.on_gpu and not setting.tiny else 1
    while len(took) < repeats and sum(took) < _MOST_SECONDS:
        synchronise(setting)
        start = time.perf_counter()
        action()
        synchronise(setting)
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e3


def check(setting: Setting) -> Iterator[CheckResult]:
    """Each kernel in every precision; without Triton, a line that says so."""
    if setting.on_gpu and not runs_triton(torch.empty(1, device=setting.device)):
        yield CheckResult("Triton kernels", False, "Triton is not installed or does not run on this GPU")
        return
    for dtype in (torch.float32, *HALF):
        # Free the cases: a page that the next ones' DRAM shares with these would be locked already.
        yield from (_compared(setting, dtype, case) for case in _cases(setting, dtype))
    yield from (_compared(setting, torch.bfloat16, case) for case in packed_cases(setting))
    for name in formats_without_grids():
        yield CheckResult(f"packed weights, {name}", None, "the package gguf, which has its grid, is not installed")


def _cases(setting: Setting, dtype: torch.dtype) -> list[Case]:
    pairs = 16 if setting.tiny else 64
    layouts = (RotaryLayout(pairs), RotaryLayout(pairs // 2, interleaved=True), RotaryLayout(0))
    cases = [_merge_case(setting, dtype), _gather_case(setting, dtype), _token_case(setting, dtype)]
    cases += [_rebuild_case(setting, dtype, layout) for layout in layouts]
    return [
        *cases,
        *prompt_cases(setting, dtype),
        *entry_cases(setting, dtype),
        *token_cases(setting, dtype),
        *cluster_cases(setting, dtype),
    ]


def _compared(setting: Setting, dtype: torch.dtype, case: Case) -> CheckResult:
    name, kernel, reference, roundings = case
    error = relative_error(kernel(), reference())
    passed = error <= roundings * torch.finfo(dtype).eps if setting.on_gpu else None
    kind = str(dtype).removeprefix("torch.")
    ours, torchs = _milliseconds(setting, kernel), _milliseconds(setting, reference)
    return CheckResult(
        f"{name}, {kind}",
        passed if error < 1 else False,
        f"error {error:.1e}; kernel {ours:.3f} ms, torch {torchs:.3f} ms"
        if setting.on_gpu
        else "torch in both places, no kernel runs on a CPU",
        {"error": error, "kernel_ms": ours, "torch_ms": torchs},
    )
