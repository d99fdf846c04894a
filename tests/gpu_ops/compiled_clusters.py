"""Launches of the kernels that choose clusters and attend to them; `compiled_kernels.py` compiles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_kv.gpu_ops.cluster_attention import PARTS
from hetero_kv.gpu_ops.cluster_choice import ChosenClusters, ClusterBudget
from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.token_attention import Parts
from hetero_kv.gpu_ops.triton_kernels import cluster_attention, cluster_choice, token_attention
from tests.gpu_ops.compiled_numbers import BRAIN, DIM, HALF, SINGLE, at_addresses, zeros
from tests.gpu_ops.compiled_tokens import stored, whole

# Of 128K tokens in blocks of 16.
CAPACITY = 8192


def of_blocks(rows: int, each: int, *shape: int, dtype: torch.dtype) -> Memory:
    """What a GPU has of each block, block by block; for several rows at addresses."""
    found = torch.zeros((rows, CAPACITY // each, 8, *shape), dtype=dtype).movedim(1, 2)
    return found if rows == 1 else at_addresses(found)


def numbers(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 3, dtype=torch.int64)[:, 2]


def scoring(dtype: torch.dtype, kind: torch.dtype, each: int, rows: int, softcap: float | None) -> Callable[[], Any]:
    q = zeros(rows, 1, 32, DIM, dtype=dtype).transpose(1, 2)
    keys, sizes = of_blocks(rows, each, DIM, each, dtype=kind), of_blocks(rows, each, each, dtype=SINGLE)
    return lambda: cluster_choice.score(q, keys, sizes, numbers(rows), 0.1, softcap)


def choosing(clusters: int, budget: ClusterBudget) -> Callable[[], Any]:
    return lambda: cluster_choice.choose(zeros(1, 8, clusters), numbers(1), 1, budget)


def listing(rows: int, is_last: bool) -> Callable[[], Any]:
    """One of the two kernels."""
    clusters, n = of_blocks(rows, 1, 16, dtype=torch.int32), CAPACITY
    best = ChosenClusters(whole(rows, 8, n, dtype=torch.int8), whole(rows, 8, 1), whole(rows, 8))
    launches = cluster_choice.listing(clusters, 1, best, numbers(rows), 4720, whole(rows, 8), whole(rows, 8))
    return launches.writing if is_last else launches.counting


def attending(dim: int, each: int, rows: int) -> Callable[[], Any]:
    sums, sizes = of_blocks(rows, each, each, dim, dtype=SINGLE), of_blocks(rows, each, each, dtype=SINGLE)
    parts = Parts(zeros(rows, 8, PARTS, 4, dim), zeros(rows, 8, PARTS, 4))
    lists = zeros(rows, 8, 4, CAPACITY), whole(rows, 8, 1901), whole(rows, 8)
    return lambda: cluster_attention.attend_to_clusters(lists[0], sums, sizes, *lists[1:], parts)


def attending_to_stored(dtype: torch.dtype, kind: torch.dtype, dim: int, bits: int) -> Callable[[], Any]:
    q = zeros(1, 1, 32, dim, dtype=dtype).transpose(1, 2)
    keys, values = zeros(9, 8, 16, dim, dtype=kind), stored((9, 8, 16), dim, bits, kind)
    lists, parts = (
        (whole(1, 500), whole(1, 8, 4096), whole(1, 8)),
        Parts(zeros(1, 8, PARTS, 4, dim), zeros(1, 8, PARTS, 4)),
    )
    return lambda: token_attention.attend_to_stored(q, keys, values, *lists, 0.1, None, parts)


#: One of every kernel, and others.
LAUNCHES: dict[str, Callable[[], Any]] = {
    "score clusters, bfloat16": scoring(BRAIN, HALF, 1, 1, None),
    "choose clusters, by shares": choosing(CAPACITY, ClusterBudget(0.018, 0.232)),
    "count tokens of clusters": listing(1, False),
    "list tokens of clusters": listing(1, True),
    "attend to clusters": attending(DIM, 1, 1),
    "attend to stored tokens, bfloat16": attending_to_stored(BRAIN, HALF, DIM, 0),
    # Further launches of these kernels.
    "score clusters, float32, soft-capped, several of a block": scoring(SINGLE, SINGLE, 8, 1, 30.0),
    "score clusters at addresses": scoring(BRAIN, HALF, 1, 4, None),
    "choose clusters, by numbers": choosing(8 * CAPACITY, ClusterBudget(100, 0)),
    "count tokens of clusters at addresses": listing(4, False),
    "list tokens of clusters at addresses": listing(4, True),
    "attend to clusters, several of a block": attending(256, 4, 1),
    "attend to clusters at addresses": attending(DIM, 1, 4),
    "attend to stored tokens, float32": attending_to_stored(SINGLE, SINGLE, 256, 0),
    "attend to stored tokens in Q8_0": attending_to_stored(HALF, HALF, DIM, 8),
}
#: Those of the latter, for the slow tests.
FURTHER = tuple(LAUNCHES)[6:]
