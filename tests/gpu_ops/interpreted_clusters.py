"""The kernels of clusters of tokens against their torch functions; `interpreted_kernels.py` runs this."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hetero_kv.gpu_ops.cluster_attention import PARTS, attend_to_clusters_in_torch
from hetero_kv.gpu_ops.cluster_choice import (
    ClusterBudget,
    choose_clusters_in_torch,
    list_tokens_in_torch,
    score_clusters_in_torch,
)
from hetero_kv.gpu_ops.token_attention import Parts, attend_to_stored_in_torch, sum_masses_in_torch
from hetero_kv.gpu_ops.triton_kernels import cluster_attention, cluster_choice, token_attention
from hetero_kv.gpu_ops.window_step import join_parts_in_torch
from tests.gpu_ops.interpreted_numbers import DTYPES, GENERATOR, difference, multiplied, random
from tests.gpu_ops.interpreted_tokens import stored_vectors


class Clusters(NamedTuple):
    """Of `count` blocks of `each` clusters and `size` tokens, in room for `capacity`."""

    count: int = 21
    capacity: int = 40
    each: int = 1
    size: int = 16
    group: int = 2
    dim: int = 32
    softcap: float | None = None
    budget: ClusterBudget = ClusterBudget(0.1, 0.3)
    slots: int = 100
    lacks_slots: bool = False


#: Shares and numbers; several clusters of a block, of no power of two; nothing estimated, all of them attended to, and
#: none at all; too few slots, and as many as there are tokens.
_SEVERAL = ClusterBudget(7, 9)
CLUSTERS = (
    Clusters(),
    Clusters(20, 20, each=3, size=24, group=5, softcap=4.0, dim=64, budget=_SEVERAL, slots=50, lacks_slots=True),
    Clusters(count=1, dim=20, budget=ClusterBudget(1, 0), slots=640),
    Clusters(count=9, each=4, budget=ClusterBudget(1.0, 0.5), slots=50, lacks_slots=True),
    Clusters(count=0, group=1),
)
#: And lists of several steps.
CHOSEN = (
    *CLUSTERS,
    Clusters(count=550, capacity=555, each=15, budget=ClusterBudget(0.2, 0.25), slots=1000, lacks_slots=True),
)


#: The number of the first cluster of the Context.
_FIRST = 5


class _Numbers(NamedTuple):
    """Random clusters of two sequences, of which some are empty, that lie block by block, heads side by side."""

    q: torch.Tensor
    keys: torch.Tensor
    sizes: torch.Tensor
    clusters: torch.Tensor
    number: torch.Tensor


def _numbers(dtype: torch.dtype, case: Clusters) -> _Numbers:
    shape, most = (case.capacity, 2, 3), max(case.count * case.each, 1)
    keys = random(*shape, case.dim, case.each, dtype=torch.float16)
    sizes = torch.randint(0, 4, (*shape, case.each), generator=GENERATOR).float()
    clusters = _FIRST + torch.randint(0, most, (*shape, case.size), generator=GENERATOR).int()
    q = random(2, 1, 3 * case.group, case.dim, dtype=dtype).transpose(1, 2)
    return _Numbers(q, *(each.movedim(0, 2) for each in (keys, sizes, clusters)), torch.tensor([case.count]))


def scored(dtype: torch.dtype, case: Clusters) -> float:
    """Of scores."""
    given = _numbers(dtype, case)
    arguments = given.q, given.keys, given.sizes, given.number, 0.3, case.softcap
    found, expected = cluster_choice.score(*arguments), score_clusters_in_torch(*arguments)
    assert torch.equal(found.isinf(), expected.isinf())
    return difference(found.masked_fill(found.isinf(), 0.0), expected.masked_fill(expected.isinf(), 0.0))


def chosen(kind: str, case: Clusters) -> bool:
    """The same clusters and tokens of them; shares behind the last cluster are no numbers."""
    given, n, total = _numbers(torch.float32, case), case.capacity * case.each, case.count * case.each
    shares = random(2, 3, n).sigmoid() if kind == "any" else torch.randint(0, 3, (2, 3, n), generator=GENERATOR) / 4
    shares[..., total:] = torch.nan
    results = []
    for choose, list_tokens in (
        (cluster_choice.choose, cluster_choice.list_tokens),
        (choose_clusters_in_torch, list_tokens_in_torch),
    ):
        found = choose(shares, given.number, case.each, case.budget)
        counts = [torch.full((2, 3), 9, dtype=torch.int32) for _ in range(2)]
        listed = list_tokens(given.clusters, _FIRST, found, given.number, case.slots, *counts)
        lists = (found.estimated, found.counts), (listed.chosen, listed.counts), (listed.beyond, listed.beyond_counts)
        parts = [found.is_exact[..., :total]]
        for each, count in lists:
            parts += [each.where(torch.arange(each.shape[2]) < count[..., None], -1), count]
        results.append(parts)
    assert bool(results[0][-1].any()) == case.lacks_slots
    return all(torch.equal(actual, expected) for actual, expected in zip(*results, strict=True))


def attended(dtype: torch.dtype, case: Clusters) -> tuple[float, float]:
    """Of the joined attention to clusters and to stored tokens, and of logarithms and the covered share."""
    given, group, clusters = _numbers(dtype, case), case.group, case.capacity * case.each
    scores = random(2, 3, group, clusters)
    scores[0, 1, :, ::3] = float("-inf")
    scores[1, 1] = float("-inf")
    lists = torch.rand(2, 3, clusters, generator=GENERATOR).argsort(dim=2).int().contiguous()
    counts = torch.full((2, 3), case.count * case.each // 2, dtype=torch.int32)
    # Packed values, and keys in another type than the queries', all of which bfloat16 has.
    stored = 2 * case.capacity, 3, case.size
    keys = (torch.randint(-8, 9, (*stored, case.dim), generator=GENERATOR) / 4).half()
    values = stored_vectors((*stored, 32), 8 if case.each == 1 else 0, dtype)
    table = torch.randperm(2 * case.capacity, generator=GENERATOR).view(2, -1).int()
    tokens = torch.rand(2, 3, case.capacity * case.size, generator=GENERATOR).argsort(dim=2).int().contiguous()
    token_counts = torch.randint(0, min(tokens.shape[2], 90) + 1, (2, 3), generator=GENERATOR).int()
    token_counts[0, 0] = 0
    sums = random(case.capacity, 2, 3, case.each, 32).movedim(0, 2)
    before, results = (random(2, 3, PARTS, group, 32), random(2, 3, PARTS, group)), []
    for attend, attend_stored, sum_up in (
        (cluster_attention.attend_to_clusters, token_attention.attend_to_stored, token_attention.sum_masses),
        (attend_to_clusters_in_torch, attend_to_stored_in_torch, sum_masses_in_torch),
    ):
        parts, shares = Parts(*(each.clone() for each in before)), torch.full((6,), torch.nan)
        rest = attend(scores, sums, given.sizes, lists, counts, parts)
        attend_stored(given.q, keys, values, table, tokens, token_counts, 0.3, case.softcap, parts)
        sum_up(parts.lse, rest, shares)
        out, lse = torch.empty(2, 3 * group, 1, 32, dtype=dtype), torch.empty(2, 3 * group)
        join_parts_in_torch(*parts, None, None, out, lse)
        results.append((out, lse, shares, rest.logsumexp(dim=2), parts.lse[:, :, 32:48].logsumexp(dim=2)))
    (out, *found), (expected, *others) = results
    apart = []
    for actual, right in zip(found, others, strict=True):
        assert torch.equal(actual.isinf(), right.isinf())
        apart.append(difference(actual.masked_fill(actual.isinf(), 0.0), right.masked_fill(right.isinf(), 0.0)))
    return difference(out, expected), max(apart)


def of_clusters() -> dict[str, dict[str, Any]]:
    """Of each kernel, by case, how far apart they are, or whether they are the same."""
    scores, attention = multiplied(DTYPES, CLUSTERS), multiplied(DTYPES, CLUSTERS)
    lists = multiplied(("any", "equal"), CHOSEN)
    return {
        "clusters scored": {f"{dtype}, {case}": scored(dtype, case) for dtype, case in scores},
        "clusters chosen": {f"{kind}, {case}": chosen(kind, case) for kind, case in lists},
        "clusters attended": {f"{dtype}, {case}": attended(dtype, case) for dtype, case in attention},
    }
