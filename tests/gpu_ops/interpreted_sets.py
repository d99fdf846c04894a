"""Kernels of sparse prefills against float64, for `interpreted_kernels.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hetero_kv.gpu_ops import query_scores
from hetero_kv.gpu_ops.key_sets import KeySets
from hetero_kv.gpu_ops.set_attention import set_attention_in_torch
from hetero_kv.gpu_ops.triton_kernels import query_scores as score_kernels
from hetero_kv.gpu_ops.triton_kernels import set_attention
from tests.gpu_ops.interpreted_numbers import DTYPES, GENERATOR, difference, multiplied, random


class SparseChunk(NamedTuple):
    """n queries from position `first` on; of the keys, `past` are in a tensor of their own.

    tokens, distances: shares of them that are chosen. blocks: the most key blocks of a query block.
    """

    first: int
    n: int
    past: int
    tokens: float = 0.05
    distances: float = 0.02
    blocks: int = 2
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    k_dim: int = 16
    v_dim: int = 16
    softcap: float | None = None
    has_sink: bool = False


#: One block that sees itself alone; a shorter last block, with everything; several blocks that see themselves alone;
#: keys before the first query in both tensors; fewer queries than a tile, all keys.
CHUNKS = (
    SparseChunk(0, 64, 0, 0.0, 0.0, 0),
    SparseChunk(130, 150, 130, batch=2, kv_heads=2, group=2, k_dim=24, v_dim=40),
    SparseChunk(200, 128, 200, 0.0, 0.0, 0, group=2, softcap=3.0, has_sink=True),
    SparseChunk(230, 70, 200, kv_heads=2, has_sink=True),
    SparseChunk(77, 20, 77, 1.0, 1.0, 1, k_dim=200, softcap=2.0),
)


def _sets(case: SparseChunk) -> KeySets:
    lists, total = (case.batch, case.kv_heads * case.group), case.first + case.n
    tokens, distances = (
        torch.rand(*lists, total, generator=GENERATOR) < share for share in (case.tokens, case.distances)
    )
    distances[..., 0] = True
    query_blocks, key_blocks = -(-case.n // 64), -(-total // 64)
    # Some lie behind the query block, and some are listed but do not count.
    blocks = torch.rand(*lists, query_blocks, key_blocks, generator=GENERATOR).argsort(dim=3).int()
    counts = torch.randint(0, case.blocks + 1, (*lists, query_blocks), generator=GENERATOR).int()
    return KeySets.of(tokens, distances, blocks, counts, case.first, case.n)


def _tensors(dtype: torch.dtype, case: SparseChunk) -> tuple[torch.Tensor, ...]:
    """q, past_k, past_v, k and v, not contiguous but in their last dimension."""
    heads, own = case.kv_heads * case.group, case.first + case.n - case.past
    q = random(case.batch, case.n, heads, case.k_dim, dtype=dtype).transpose(1, 2)
    past_k = random(case.batch, case.kv_heads, case.past + 9, case.k_dim, dtype=dtype)[:, :, : case.past]
    past_v = random(case.batch, case.past, case.kv_heads, case.v_dim, dtype=dtype).transpose(1, 2)
    k, v = (random(case.batch, case.kv_heads, own, dim, dtype=dtype) for dim in (case.k_dim, case.v_dim))
    return q, past_k, past_v, k, v


def _apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return difference(actual, expected.to(actual.dtype))


def attended(dtype: torch.dtype, case: SparseChunk) -> tuple[float, float, bool]:
    """Of the output and of the log-sum-exp, and whether as many keys are attended to."""
    tensors, sets = _tensors(dtype, case), _sets(case)
    sink = random(case.kv_heads * case.group, dtype=dtype) * 3 if case.has_sink else None
    rules = sets, 0.3, case.softcap
    out, lse, count = set_attention.set_attention(*tensors, *rules, sink)
    exact_sink = None if sink is None else sink.double()
    exact = set_attention_in_torch(*(each.double() for each in tensors), *rules, exact_sink)
    return _apart(out, exact[0]), _apart(lse, exact[1]), torch.equal(count, exact[2])


def scored(dtype: torch.dtype, case: SparseChunk) -> list[float]:
    """Of log-sum-exps, of sums by token and by distance, and of unseen weights."""
    q, past_k, _, k, _ = _tensors(dtype, case)
    sets, first, rules = _sets(case), case.first, (0.3, case.softcap)
    tensors, exact = (q, past_k, k), [each.double() for each in (q, past_k, k)]
    lasts, samples = query_scores.last_places(case.n, q.device), query_scores.sampled_places(case.n, q.device)
    lse = query_scores.logsumexp_in_torch(*exact, lasts, first, *rules)
    found = [(score_kernels.logsumexp(*tensors, lasts, first, *rules), lse)]
    by_line = score_kernels.line_sums(*tensors, lse.float(), first, *rules)
    found += zip(by_line, query_scores.line_sums_in_torch(*exact, lse, first, *rules), strict=True)
    total, unseen = score_kernels.unseen_logsumexp(*tensors, samples, sets, *rules)
    exact_total, exact_unseen = query_scores.unseen_logsumexp_in_torch(*exact, samples, sets, *rules)
    assert torch.equal(unseen.isinf(), exact_unseen.isinf())
    # Weights, because logarithms may be about 0.
    weights = (logarithms - exact_total[:, :, None] for logarithms in (unseen, exact_unseen))
    found += [(total, exact_total), tuple(each.exp().float() for each in weights)]
    return [_apart(*each) for each in found]


def of_sets() -> dict[str, Any]:
    """The results by kernel and case, in tiles as on a GPU from Ampere on."""
    set_attention.multiplies_halves = score_kernels.multiplies_halves = lambda tensor: tensor.element_size() == 2
    cases = list(multiplied(DTYPES, CHUNKS))
    return {
        "attended to sets": {f"{dtype}, {case}": attended(dtype, case) for dtype, case in cases},
        "query scores": {f"{dtype}, {case}": scored(dtype, case) for dtype, case in cases},
    }
