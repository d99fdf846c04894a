"""Compares the kernels that choose clusters and attend to their tokens with the torch functions that define them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_checks.setting import HALF, Setting, in_own_pages
from benchmarks.gpu_checks.token_kernels import BLOCK, SCALE, Case, by_kernel, in_torch, numbers_of
from hetero_kv.gpu_ops import cluster_attention, cluster_choice, estimated_masses, token_attention
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.gpu_ops.window_step import SPLITS, join_parts_in_torch

_SLOTS = 300


def cluster_cases(setting: Setting, dtype: torch.dtype) -> list[Case]:
    """The kernels of a decoded token with queries in `dtype`."""
    return [_choice(setting), _attention(setting, dtype)]


def _choice(setting: Setting) -> Case:
    (kv_heads, _, blocks, _), device = numbers_of(setting), setting.device
    # Whole numbers, with many equal ones.
    shares = torch.randint(0, 64, (1, kv_heads, blocks)) / 64
    clusters = torch.randint(0, blocks - 3, (1, kv_heads, blocks, BLOCK)).int()
    budget, number = cluster_choice.ClusterBudget(0.018, 0.232), torch.tensor([blocks - 3])

    def chosen(function: Callable[..., Callable[..., Any]], on: torch.device) -> torch.Tensor:
        best = function(cluster_choice, "choose_clusters")(shares.to(on), number.to(on), 1, budget)
        counts = [torch.zeros(1, kv_heads, dtype=torch.int32, device=on) for _ in range(2)]
        lists = clusters.to(on), 0, best, number.to(on), _SLOTS, *counts
        listed = function(cluster_choice, "list_tokens")(*lists)
        parts = [best.is_exact[..., : blocks - 3], *counts]
        for each, count in ((best.estimated, best.counts), (listed.chosen, counts[0]), (listed.beyond, counts[1])):
            parts.append(each.where(torch.arange(each.shape[2], device=on) < count[..., None], -1))
        return torch.cat([part.flatten().int() for part in parts]).to(device)

    return (
        "choice of clusters",
        lambda: chosen(partial(by_kernel, setting), device),
        lambda: chosen(in_torch, torch.device("cpu")),
        0.0,
    )


def _attention(setting: Setting, dtype: torch.dtype) -> Case:
    (kv_heads, group, blocks, dim), device = numbers_of(setting), setting.device

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    q = random(1, kv_heads * group, 1, dim).to(dtype)
    keys, sums = random(1, kv_heads, blocks, dim, 1).half(), random(1, kv_heads, blocks, 1, dim)
    sizes = torch.randint(0, 40, (1, kv_heads, blocks, 1), device=device).float()
    listed = torch.rand(1, kv_heads, blocks, device=device).argsort(dim=2).int().contiguous()
    counts = torch.full((1, kv_heads), blocks // 4, dtype=torch.int32, device=device)
    number, window = torch.tensor([blocks - 3], device=device), random(1, kv_heads, SPLITS, group)
    stored = in_own_pages(torch.randn(40, kv_heads, BLOCK, dim).half())
    mapped = MappedMemory(stored, device)
    if setting.on_gpu and not mapped.reach(stored.nbytes):
        raise RuntimeError(f"the {stored.nbytes:,} bytes that single tokens are read from are not page-locked")
    table = torch.randperm(40).int()[None].to(device)
    tokens = torch.rand(1, kv_heads, 40 * BLOCK, device=device).argsort(dim=2).int().contiguous()
    token_counts = torch.full((1, kv_heads), 70, dtype=torch.int32, device=device)

    def attended(function: Callable[..., Callable[..., Any]], in_dram: torch.Tensor) -> torch.Tensor:
        shape = 1, kv_heads, cluster_attention.PARTS, group
        parts = token_attention.Parts(torch.zeros(*shape, dim, device=device), torch.full(shape, -9.0, device=device))
        scores = function(cluster_choice, "score_clusters")(q, keys, sizes, number, SCALE, None)
        totals = function(estimated_masses, "log_totals")(scores, scores, window, number)
        lists = table, tokens, token_counts
        function(token_attention, "attend_to_stored")(q, in_dram, in_dram, *lists, SCALE, None, parts)
        of_clusters = scores, sums, sizes, listed, counts, parts
        rest = function(cluster_attention, "attend_to_clusters")(*of_clusters)
        shares = torch.empty(kv_heads, device=device)
        function(token_attention, "sum_masses")(parts.lse, rest, shares)
        out, lse = torch.empty_like(q), torch.empty(1, kv_heads * group, device=device)
        join_parts_in_torch(*parts, None, None, out, lse)
        return torch.cat([out.float().flatten(), lse.flatten(), shares, totals.flatten()])

    # A weight in half precision is rounded before it is multiplied.
    limit = 4.0 if dtype in HALF else 50.0
    on_device = stored.to(device)
    return (
        "attention to clusters",
        lambda: attended(partial(by_kernel, setting), mapped.tensor if setting.on_gpu else on_device),
        lambda: attended(in_torch, on_device),
        limit,
    )
