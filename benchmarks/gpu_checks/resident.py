"""Compares a GPU that chooses with the CPU (`attend_on: gpu`, `auto`, `split`, `index_device: gpu`).

With covering budgets it is compared with full attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_checks.exactness import ExactnessSubject
from benchmarks.gpu_checks.setting import HALF, CheckResult, Setting, relative_error
from hetero_kv import HeteroCache, eject, inject

_COVERING = 10**6
_SIZES = {"block_size": 32, "sink_tokens": 32, "local_windows_len": 32}
#: Name -> recipe, and settings by which few tokens are attended to.
PARTIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "quest": ("quest", {"top_k_blocks": 4, "dense_layer_num": 0}),
    "ktransformers": ("ktransformers", {"top_k_blocks": 4}),
    "adaptive": ("adaptive", {"top_k_blocks": 4, "max_dense_blocks": 0, "min_blocks": 1}),
    "adaptive_lean": ("adaptive_lean", {"top_k_blocks": 4, "max_dense_blocks": 0, "min_blocks": 1}),
    "adaptive in Q4_0": ("adaptive", {"top_k_blocks": 4, "max_dense_blocks": 0, "min_blocks": 1, "kv_type": "Q4_0"}),
    "retroinfer": ("retroinfer", {"exact_clusters": 0.2, "estimated_clusters": 0.3}),
}
#: The same with budgets that cover all tokens, of keys and values that are not rounded.
COVERING: dict[str, dict[str, Any]] = {
    "quest": {"top_k_blocks": _COVERING},
    "ktransformers": {"top_k_blocks": _COVERING},
    "adaptive": {"max_dense_blocks": _COVERING},
    "adaptive_lean": {"max_dense_blocks": _COVERING},
    "retroinfer": {"exact_clusters": 1.0},
}
#: Of them those of whose blocks, chosen by a GPU, the CPU attends to all or to some.
SCORED = ("quest", "ktransformers")
_PLACE = "place"
#: Statistics of both routes may differ by a token at near ties.
_TIES = 0.02


def check(setting: Setting) -> Iterator[CheckResult]:
    """All routes give the same logits but for rounding, and a covering budget gives full attention."""
    if not setting.on_gpu:
        yield CheckResult("attend_on: gpu", None, "it needs a GPU")
        return
    subject = ExactnessSubject(setting, "llama")
    for dtype in HALF:
        kind, rounding = str(dtype).removeprefix("torch."), subject.rounding[dtype]
        for name, (recipe, settings) in PARTIAL.items():
            by_cpu, told = _logits(subject, dtype, recipe, {**settings, "attend_on": "cpu"})
            ways = {name: {"attend_on": "gpu"}, f"{name}, attend_on: auto,": {"attend_on": "auto"}}
            if name in SCORED:
                ways[f"{name}, attend_on: split,"] = {"attend_on": "split"}
                ways[f"{name}, index_device: gpu,"] = {"index_device": "gpu"}
            for title, way in ways.items():
                by_gpu, found = _logits(subject, dtype, recipe, {**settings, **way})
                error, apart = relative_error(by_gpu, by_cpu), _apart(told, found)
                yield CheckResult(
                    f"{title} as by the CPU, {kind}",
                    error <= 2 * rounding and apart <= _TIES,
                    f"error {error:.2e}, at most {2 * rounding:.2e}; statistics differ by {apart:.1%}{found[_PLACE]}",
                    {"error": error, "limit": 2 * rounding, "apart": apart},
                )
            if name not in COVERING:
                continue
            whole, _ = _logits(subject, dtype, recipe, {**settings, **COVERING[name], "attend_on": "gpu"})
            error, limit = relative_error(whole, subject.expected), 2 * rounding + 2e-3
            yield CheckResult(
                f"{name} with a covering budget, {kind}",
                error <= limit,
                f"error {error:.2e}, at most {limit:.2e}; full attention in {kind} {rounding:.2e}",
                {"error": error, "limit": limit},
            )


def _logits(
    subject: ExactnessSubject, dtype: torch.dtype, recipe: str, settings: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The logits of the subject's conversation under a recipe, the cache's statistics, and what `auto` has chosen."""
    model = subject.halves[dtype]
    inject(model, recipe, command_line={**_SIZES, "chunk_size": 64, "max_seq_len": 1024, **settings})
    try:
        cache = HeteroCache(model)
        decision = model.hetero_kv_injection.place.decision
        place = {_PLACE: "" if decision is None else f"; {decision}"}
        return subject.logits(model, cache), dict(cache.statistics) | place
    finally:
        eject(model)


def _apart(told: dict[str, Any], found: dict[str, Any]) -> float:
    """The largest relative difference of a statistic of the attended tokens in any layer."""
    pairs = [
        (expected, actual)
        for name in ("estimated_share", "attended_blocks", "attended_tokens")
        for expected, actual in zip(told.get(name, ()), found.get(name, ()), strict=True)
        if expected is not None
    ]
    return max((abs(actual - expected) / max(abs(expected), 1e-9) for expected, actual in pairs), default=0.0)
