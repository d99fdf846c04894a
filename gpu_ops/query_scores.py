"""The attention of a few of a chunk's queries, by which its sparse prefill chooses keys, on a GPU.

No score is stored: a pass finds each query's log-sum-exp, and another one sums the attention.
"""

from __future__ import annotations

import torch

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.gpu_ops.key_sets import KeySets

#: Last queries of a chunk whose attention is summed, as on a CPU (`cpu_ops.qk_tile.QUERY_COLUMNS`).
LAST_QUERIES = 64
#: Sampled queries of a query block, as on a CPU (`cpu_ops.matched_blocks.SAMPLED_QUERIES`).
SAMPLED_QUERIES = 4


def attention_by_line(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, first: int, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention that tokens, and distances, receive from a chunk's last queries, summed over these queries.

    As `chosen_keys.attention_by_line`, for all rows and heads, by Triton kernels on CUDA.

    Args:
        q: [batch, kv_heads * group, n, k_dim], at positions first, ..., first + n - 1.
        past_k, k: [batch, kv_heads, past, k_dim] and [batch, kv_heads, own, k_dim], the keys of all positions.
        scale, softcap: as in `tiled_attention`.

    Returns two [batch, kv_heads * group, first + n] float32: by token, and by the distance of the key from the query.
    """
    from hetero_kv.gpu_ops.triton_kernels import query_scores as kernels

    with torch.cuda.device(q.device):
        lse = kernels.logsumexp(q, past_k, k, last_places(q.shape[2], q.device), first, scale, softcap)
        return kernels.line_sums(q, past_k, k, lse, first, scale, softcap)


def unseen_attention(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, sets: KeySets, scale: float, softcap: float | None
) -> torch.Tensor:
    """The attention of each key block's keys outside a query block's lines: its largest share of a sampled query's.

    As `cpu_ops.matched_blocks.matched_blocks`, for all rows and heads, by a Triton kernel on CUDA. The lines are the
    tokens and offsets of `sets`.

    Args:
        q: [batch, kv_heads * group, n, k_dim], the queries of `sets`.
        past_k, k, scale, softcap: as for `attention_by_line`.

    Returns [batch, kv_heads * group, query blocks, key blocks] float32, the logarithms of shares; -inf for none.
    """
    from hetero_kv.gpu_ops.triton_kernels import query_scores as kernels

    with torch.cuda.device(q.device):
        places = sampled_places(sets.n, q.device)
        lse, unseen = kernels.unseen_logsumexp(q, past_k, k, places, sets, scale, softcap)
        shares = (unseen - lse[:, :, None]).unflatten(3, (-1, SAMPLED_QUERIES)).amax(dim=4)
        return shares.transpose(2, 3)


def last_places(n: int, device: torch.device) -> torch.Tensor:
    """The last queries of n, from the last one on: [queries] int32."""
    count = min(n, LAST_QUERIES)
    return torch.arange(n - 1, n - 1 - count, -1, dtype=torch.int32, device=device)


def sampled_places(n: int, device: torch.device) -> torch.Tensor:
    """The sampled queries of each query block of n queries: evenly spaced, including the last one: [queries] int32."""
    step = QUERY_BLOCK // SAMPLED_QUERIES
    samples = -(-n // QUERY_BLOCK) * SAMPLED_QUERIES
    return torch.arange(step - 1, samples * step, step, dtype=torch.int32, device=device).clamp_(max=n - 1)


def logsumexp_in_torch(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, places: torch.Tensor, first: int, scale: float,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """The log-sum-exp of the queries at `places`, on any device: [batch, heads, places]."""
    return _scores(q, past_k, k, places, first, scale, softcap).logsumexp(dim=-1)


def line_sums_in_torch(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, first: int, scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition of `attention_by_line`, on any device, from the log-sum-exp of the last queries."""
    n, total = q.shape[2], first + q.shape[2]
    scores = _scores(q, past_k, k, last_places(n, q.device), first, scale, softcap)[..., :total]
    shares = torch.exp(scores - lse[..., None])
    by_distance = torch.zeros_like(shares[:, :, 0])
    for column in range(lse.shape[2]):
        # The query is `column` tokens before the last one, and sees no later token.
        by_distance[..., : total - column] += shares[:, :, column, : total - column].flip(-1)
    return shares.sum(dim=2), by_distance


def unseen_logsumexp_in_torch(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, places: torch.Tensor, sets: KeySets, scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of the sampled queries at `places`, as many of each query block, on any device.

    Returns the log-sum-exp of all keys [batch, heads, places], and of the keys of each block outside the lines,
    [batch, heads, key blocks, places].
    """
    scores = _scores(q, past_k, k, places, sets.first, scale, softcap)[..., : sets.total]
    seen = sets.seen_by_line().repeat_interleave(len(places) // sets.query_blocks, dim=2)
    key_blocks = -(-sets.total // QUERY_BLOCK)
    rest = key_blocks * QUERY_BLOCK - sets.total
    padded = torch.nn.functional.pad(scores.masked_fill(seen, float("-inf")), (0, rest), value=float("-inf"))
    unseen = padded.unflatten(-1, (key_blocks, QUERY_BLOCK)).logsumexp(dim=-1)
    return scores.logsumexp(dim=-1), unseen.transpose(2, 3)


def _scores(
    q: torch.Tensor, past_k: torch.Tensor, k: torch.Tensor, places: torch.Tensor, first: int, scale: float,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Scores of the queries at `places` [batch, heads, places, tokens], -inf for tokens after a query."""
    group = q.shape[1] // k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = torch.cat([past_k, k], dim=2).to(dtype).repeat_interleave(group, dim=1)
    scores = q[:, :, places.long()].to(dtype) @ keys.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    token = torch.arange(keys.shape[2], device=q.device)
    return scores.masked_fill_(token > first + places[:, None], float("-inf"))
