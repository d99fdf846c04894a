"""Compares the kernels that choose single tokens and attend to them with the torch functions that define them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from benchmarks.gpu_checks.setting import HALF, Setting, in_own_pages
from hetero_kv.gpu_ops import estimated_masses, stored_keys, token_attention, token_choice, token_slots
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.gpu_ops.window_step import SPLITS, join_parts_in_torch
from hetero_kv.store import storage
from hetero_kv.store.key_codes import encode

Case = tuple[str, Callable[[], Any], Callable[[], Any], float]
BLOCK, SCALE = 16, 0.1


def in_torch(module: ModuleType, name: str) -> Callable[..., Any]:
    return getattr(module, f"{name}_in_torch")


def by_kernel(setting: Setting, module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of `module` that launches a kernel; without a GPU its definition."""
    return getattr(module, name) if setting.on_gpu else in_torch(module, name)


def token_cases(setting: Setting, dtype: torch.dtype) -> list[Case]:
    """The kernels of a decoded token with queries in `dtype`."""
    return [
        _estimates(setting, dtype), _stored_keys(setting, dtype), _choice(setting), _slots(setting, dtype),
        _attention(setting, dtype), _attention(setting, dtype, "Q4_0"),
    ]  # fmt: skip


def numbers_of(setting: Setting) -> tuple[int, int, int, int]:
    """Kv heads, query heads of each, blocks, and dimensions."""
    return (2, 2, 30, 32) if setting.tiny else (8, 4, 8192, 128)


def _estimates(setting: Setting, dtype: torch.dtype) -> Case:
    (kv_heads, group, blocks, dim), device = numbers_of(setting), setting.device
    keys = torch.randn(blocks, kv_heads, BLOCK, dim, device=device)
    kind = storage.get("Q8_0")
    vectors = kind.encode(torch.stack([keys.mean(dim=2), keys.std(dim=2, correction=0)], dim=2))
    codes = encode(keys - kind.decode(vectors)[:, :, :1].float())
    index = [array[:, None].movedim(0, 2) for array in (vectors, codes.squeeze(2))]
    q = torch.randn(1, kv_heads * group, 1, dim, device=device).to(dtype)
    number, outside = torch.tensor([blocks - 3], device=device), torch.randn(1, kv_heads, SPLITS, group, device=device)

    def shares(function: Callable[[ModuleType, str], Callable[..., Any]]) -> torch.Tensor:
        of = estimated_masses
        known = function(of, "score_means")(q, index[0], number, BLOCK, SCALE, None)
        function(of, "score_codes")(q, index[1], None, number, BLOCK, known, SCALE, None, None)
        totals = function(of, "log_totals")(known.likely, known.masses, outside, number)
        return torch.stack(function(of, "mean_shares")(known.likely, known.masses, totals))[..., : blocks - 3]

    by_kernels = partial(by_kernel, setting)
    # Exponentials of sums over a head's channels.
    return "estimated attention masses", lambda: shares(by_kernels), lambda: shares(in_torch), _single(dtype, 100.0)


def _stored_keys(setting: Setting, dtype: torch.dtype) -> Case:
    (kv_heads, group, blocks, dim), device = numbers_of(setting), setting.device
    keys, kind = torch.randn(blocks, kv_heads, BLOCK, dim, device=device), storage.get("Q4_0")
    offsets = keys.mean(dim=2, keepdim=True).half()
    stored, added = (each[:, None].movedim(0, 2) for each in (kind.encode(keys - offsets.float()), offsets))
    q = torch.randn(1, kv_heads * group, 1, dim, device=device).to(dtype)
    number = torch.tensor([blocks - 3], device=device)

    def masses(function: Callable[[ModuleType, str], Callable[..., Any]]) -> torch.Tensor:
        known = estimated_masses.BlockMasses(*torch.zeros(4, 1, kv_heads, group, blocks, device=device))
        score = function(stored_keys, "score_stored_keys")
        score(q, stored, added, None, number, known, SCALE, None, None)
        return known.masses[..., : blocks - 3]

    by_kernels = partial(by_kernel, setting)
    return "masses of packed keys", lambda: masses(by_kernels), lambda: masses(in_torch), _single(dtype, 100.0)


def _single(dtype: torch.dtype, roundings: float) -> float:
    """So many roundings of float32, in those of `dtype`."""
    return roundings * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps


def _choice(setting: Setting) -> Case:
    (kv_heads, group, blocks, _), device = numbers_of(setting), setting.device
    n, width = blocks // 4 * BLOCK, blocks // 4 * BLOCK
    # Whole numbers of which sums are exact in any order, with many equal ones.
    counts = torch.randint(0, 64, (1, kv_heads, n)).float()
    shares = counts / 2 ** counts.sum(dim=2, keepdim=True).log2().ceil()
    totals = torch.zeros(3, 1, kv_heads, group)
    totals[2] = -9.0
    places = torch.arange(0, blocks // 4 * 3, 3, dtype=torch.int32).expand(1, kv_heads, -1).contiguous()
    place_counts = torch.full((1, kv_heads), blocks // 4 - 2, dtype=torch.int32)
    target = token_choice.Target(0.4, 0, width, 1, 2)
    inputs = shares, shares, totals, torch.tensor([blocks])

    def chosen(choose: Callable[..., None], on: torch.device) -> torch.Tensor:
        made = torch.empty(1, kv_heads, width, dtype=torch.int32, device=on)
        count = torch.empty(1, kv_heads, dtype=torch.int32, device=on)
        taken = torch.empty(1, kv_heads, n, dtype=torch.int8, device=on)
        given = [each.to(on) for each in (*inputs, places, place_counts)]
        choose(*given[:4], BLOCK, *given[4:], target, made, count, taken)
        return torch.cat([made.flatten(), count.flatten(), taken.flatten()]).to(device)

    return (
        "choice by a share",
        lambda: chosen(by_kernel(setting, token_choice, "choose"), device),
        lambda: chosen(token_choice.choose_in_torch, torch.device("cpu")),
        0.0,
    )


def _slots(setting: Setting, dtype: torch.dtype) -> Case:
    (kv_heads, _, blocks, dim), device = numbers_of(setting), setting.device
    pool = in_own_pages(torch.randn(blocks // 4, kv_heads, BLOCK, dim).half())
    mapped = MappedMemory(pool, device)
    if setting.on_gpu and not mapped.reach(pool.nbytes):
        raise RuntimeError(f"the {pool.nbytes:,} bytes that single tokens are read from are not page-locked")
    tokens = len(pool) * BLOCK
    table = torch.randperm(len(pool)).int()[None]
    size = tokens // 4
    orders = [torch.rand(1, kv_heads, tokens).argsort(dim=2)[..., :size].int().contiguous() for _ in range(3)]
    # Later choices find some of the tokens in slots.
    orders[1][..., : size // 2] = orders[0][..., : size // 2]
    counts = torch.full((1, kv_heads), size - 5, dtype=torch.int32)
    counts[0, 0] = 3

    def brought(function: Callable[[ModuleType, str], Callable[..., Any]], on: torch.device) -> torch.Tensor:
        slots = token_slots.TokenSlots.empty(1, kv_heads, size, tokens, on)
        memory = torch.zeros(1, kv_heads, size, dim, dtype=dtype, device=on)
        missed, seen = torch.zeros(kv_heads, dtype=torch.int32, device=on), []
        for order in orders:
            arguments = slots, order.to(on), counts.to(on), missed
            at, misses, into = function(token_slots, "place_tokens")(*arguments)
            stored = mapped.tensor if on.type == "cuda" else pool
            function(token_slots, "fetch_tokens")(stored, table.to(on), misses, into, missed, memory)
            seen += [memory.float().flatten(), missed.float(), at[..., :3].float().flatten()]
        return torch.cat([*seen, slots.ids.float().flatten()]).to(device)

    by_kernels = partial(by_kernel, setting)
    return (
        "single tokens from page-locked DRAM",
        lambda: brought(by_kernels, device),
        lambda: brought(in_torch, torch.device("cpu")),
        0.0,
    )


def _attention(setting: Setting, dtype: torch.dtype, packed: str | None = None) -> Case:
    (kv_heads, group, blocks, dim), device = numbers_of(setting), setting.device
    size = blocks // 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    q, keys, values = (random(1, *shape, dim).to(dtype) for shape in ((kv_heads * group, 1), *[(kv_heads, size)] * 2))
    slots = torch.rand(1, kv_heads, size, device=device).argsort(dim=2).int().contiguous()
    offsets = None
    if packed is not None:
        keys, values = (storage.get(packed).encode(each) for each in (keys, values))
        vectors = random(1, size // BLOCK + 1, kv_heads, 1, dim).half().movedim(1, 2)
        offsets = token_attention.KeyOffsets(vectors, slots, BLOCK)
    counts = torch.full((1, kv_heads), size // 2, dtype=torch.int32, device=device)
    weights, masses = random(1, kv_heads, group, blocks), random(1, kv_heads, group, blocks)
    means = storage.get("Q8_0").encode(random(blocks, 1, kv_heads, dim)).movedim(0, 2)
    number = torch.tensor([blocks - 5], device=device)
    window = random(1, kv_heads, SPLITS, group, dim), random(1, kv_heads, SPLITS, group)

    def attended(function: Callable[[ModuleType, str], Callable[..., Any]]) -> torch.Tensor:
        of, shape = token_attention, (1, kv_heads, token_attention.PARTS, group)
        parts = of.Parts(torch.zeros(*shape, dim, device=device), torch.zeros(shape, device=device))
        parts.out[:, :, :SPLITS], parts.lse[:, :, :SPLITS] = window
        function(of, "attend_to_tokens")(q, keys, values, slots, counts, SCALE, None, parts, offsets)
        rest = function(of, "attend_to_rest")(weights, masses, means, number, parts)
        shares = torch.empty(kv_heads, device=device)
        function(of, "sum_masses")(parts.lse, rest, shares)
        out, lse = torch.empty_like(q), torch.empty(1, kv_heads * group, device=device)
        join_parts_in_torch(*parts, None, None, out, lse)
        return torch.cat([out.float().flatten(), lse.flatten(), shares])

    by_kernels = partial(by_kernel, setting)
    # A weight in half precision is rounded before it is multiplied.
    limit = 4.0 if dtype in HALF else 50.0
    name = "attention to single tokens" if packed is None else f"attention to single tokens in {packed}"
    return name, lambda: attended(by_kernels), lambda: attended(in_torch), limit
