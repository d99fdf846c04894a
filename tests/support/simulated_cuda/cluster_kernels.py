"""What the kernels compute that choose clusters and attend to them; `kernels` has the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetero_kv.gpu_ops.cluster_attention import attend_to_clusters_in_torch
from hetero_kv.gpu_ops.cluster_choice import (
    ChosenClusters,
    ClusterBudget,
    choose_clusters_in_torch,
    list_tokens_in_torch,
    score_clusters_in_torch,
)
from hetero_kv.gpu_ops.token_attention import Parts


def _score_clusters(
    q: Any, keys: Any, sizes: Any, number: Any, scores: Any, capacity: int, kv_heads: int, scale: float,
    softcap: float, *_: Any, **__: Any,
) -> None:  # fmt: skip
    scores.copy_(score_clusters_in_torch(q, keys, sizes, number, scale, softcap))


def _choose_clusters(
    shares: Any, number: Any, is_exact: Any, estimated: Any, counts: Any, *_: Any, **fixed: Any
) -> None:
    further = (fixed["FURTHER_SHARE"] or fixed["FURTHER_NUMBER"]) if fixed["ESTIMATES"] else 0
    budget = ClusterBudget(fixed["EXACT_SHARE"] or fixed["EXACT_NUMBER"], further)
    found = choose_clusters_in_torch(shares, number, fixed["EACH"], budget)
    for out, each in zip((is_exact, estimated, counts), found, strict=True):
        out.copy_(each)


def _count_tokens(*_: Any, **__: Any) -> None:
    """`_list_tokens` counts as well."""


def _list_tokens(
    clusters: Any, is_exact: Any, number: Any, parts: Any, chosen: Any, counts: Any, beyond: Any, beyond_counts: Any,
    kv_heads: int, first: int, blocks: int, slots: int, *_: Any, **__: Any,
) -> None:  # fmt: skip
    best = ChosenClusters(is_exact, is_exact, is_exact)
    found = list_tokens_in_torch(clusters, first, best, number, slots, counts, beyond_counts)
    chosen.copy_(found.chosen)
    beyond.copy_(found.beyond)


def _attend_clusters(
    scores: Any, sums: Any, sizes: Any, listed: Any, counts: Any, lse: Any, out: Any, rest: Any, *_: Any, **__: Any
) -> None:
    rest.copy_(attend_to_clusters_in_torch(scores, sums, sizes, listed, counts, Parts(out, lse)))


#: See `kernels`.
DEFINITIONS: dict[str, Callable[..., None]] = {
    "_score_clusters": _score_clusters,
    "_choose_clusters": _choose_clusters,
    "_count_tokens": _count_tokens,
    "_list_tokens": _list_tokens,
    "_attend_clusters": _attend_clusters,
}
#: See `kernels`.
WRITTEN: dict[str, tuple[str, ...]] = {
    "_score_clusters": ("scores",),
    "_choose_clusters": ("is_exact", "estimated", "counts"),
    "_count_tokens": ("parts",),
    "_list_tokens": ("chosen", "counts", "beyond", "beyond_counts"),
    "_attend_clusters": ("lse", "out", "rest"),
}
