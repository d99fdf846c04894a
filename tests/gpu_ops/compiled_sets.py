"""Launches of the kernels of sparse prefills, for `compiled_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_kv.gpu_ops.key_sets import KeySets
from hetero_kv.gpu_ops.query_scores import last_places, sampled_places
from hetero_kv.gpu_ops.triton_kernels import query_scores, set_attention
from tests.gpu_ops.compiled_numbers import BRAIN, DIM, HALF, SINGLE, zeros


def sets_of(n: int, total: int) -> KeySets:
    """Sets of a chunk's last n queries that have eight heads."""
    masks, blocks = torch.zeros(2, 1, 8, total, dtype=torch.bool), torch.zeros(1, 8, -(-n // 64), 2, dtype=torch.int32)
    return KeySets.of(*masks, blocks, blocks[..., 0].contiguous(), total - n, n)


def attending_to_sets(dtype: torch.dtype, dim: int, n: int, *additions: Any) -> Callable[[], Any]:
    q, keys = zeros(1, n, 8, dim, dtype=dtype).transpose(1, 2), zeros(1, 2, 900, dim, dtype=dtype)
    past, own = keys[:, :, :300], zeros(1, n, 2, dim, dtype=dtype).transpose(1, 2)
    return lambda: set_attention.set_attention(q, past, past, own, own, sets_of(n, 300 + n), 0.1, *additions)


def scoring_queries(dtype: torch.dtype, dim: int, n: int, kernel: str, softcap: float | None = None) -> Any:
    q, keys = zeros(1, n, 8, dim, dtype=dtype).transpose(1, 2), zeros(1, 2, 900, dim, dtype=dtype)[:, :, :300]
    own = zeros(1, n, 2, dim, dtype=dtype).transpose(1, 2)
    places = (sampled_places if kernel == "unseen" else last_places)(n, q.device)
    lse = zeros(1, 8, len(places))
    return {
        "logsumexp": lambda: query_scores.logsumexp(q, keys, own, places, 300, 0.1, softcap),
        "lines": lambda: query_scores.line_sums(q, keys, own, lse, 300, 0.1, softcap),
        "unseen": lambda: query_scores.unseen_logsumexp(q, keys, own, places, sets_of(n, 300 + n), 0.1, softcap),
    }[kernel]


#: By name, as in `compiled_kernels.LAUNCHES` and `compiled_kernels.FURTHER`.
LAUNCHES: dict[str, Callable[[], Any]] = {
    "attend to sets, bfloat16": attending_to_sets(BRAIN, DIM, 256),
    "attend to sets, float16, soft-capped, with a sink": attending_to_sets(HALF, 256, 200, 50.0, zeros(8, dtype=HALF)),
    "attend to sets, float32": attending_to_sets(SINGLE, DIM, 200),
    "log-sum-exp of queries, bfloat16": scoring_queries(BRAIN, DIM, 256, "logsumexp"),
    "log-sum-exp of queries, float32, soft-capped": scoring_queries(SINGLE, 256, 200, "logsumexp", 30.0),
    "sums by line, bfloat16": scoring_queries(BRAIN, DIM, 256, "lines"),
    "sums by line, float32, soft-capped": scoring_queries(SINGLE, 256, 200, "lines", 30.0),
    "unseen attention, bfloat16": scoring_queries(BRAIN, DIM, 256, "unseen"),
    "unseen attention, float32, soft-capped": scoring_queries(SINGLE, 80, 200, "unseen", 30.0),
}
FURTHER = (
    "attend to sets, bfloat16",
    "attend to sets, float32",
    "log-sum-exp of queries, bfloat16",
    "sums by line, float32, soft-capped",
    "unseen attention, bfloat16",
)
