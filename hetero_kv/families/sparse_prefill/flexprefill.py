"""FlexPrefill (arXiv:2502.20766): as few keys as are estimated to have a share of the attention, chunk by chunk."""

from __future__ import annotations

import math

import numpy as np
import torch

from cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.head_views import HeadView, views
from hetero_kv.families.sparse_prefill.lists import Blocks, Lines

# The paper's threshold of the square root of the Jensen-Shannon divergence.
_NEAR = 0.1


def keys_of(chunk: Chunk, mass: float, least: int) -> list[Lines | Blocks]:
    """The keys of all rows and heads that have `mass` of the attention by estimate; `least`: tokens at least."""
    return [_keys(view, mass, least) for view in views(chunk)]


def _keys(view: HeadView, mass: float, least: int) -> Lines | Blocks:
    if estimate_distance(view) < _NEAR:
        return blocks_of_mass(view.block_scores(), mass, least)
    return view.lines_of_mass(mass, least)


def estimate_distance(view: HeadView) -> float:
    """How far the attention to key blocks is from what means of blocks say of it, both of the last queries.

    The square root of the Jensen-Shannon divergence, in nats: 0 to 0.83.
    """
    queries = view.queries
    by_token = view.sums[0]
    starts = np.arange(0, by_token.size, QUERY_BLOCK)
    true = np.add.reduceat(by_token.astype(np.float64), starts) / queries
    q = view.chunk.q[view.row, view.head, -queries:].float().mean(dim=0)
    scores = view.chunk.capped(view.key_means @ q)
    return math.sqrt(_jensen_shannon(true, scores.double().softmax(0).numpy()))


def _jensen_shannon(a: np.ndarray, b: np.ndarray) -> float:
    middle = (a + b) / 2
    return sum(
        0.5 * float(np.sum(each[each > 0] * np.log(each[each > 0] / middle[each > 0]))) for each in (a, b)
    )  # fmt: skip


def blocks_of_mass(scores: torch.Tensor, mass: float, least: int) -> Blocks:
    """For each block of queries the fewest key blocks whose softmax reaches `mass`, the sink's among them.

    scores: [query blocks, key blocks] float32.
    """
    shares, order = scores.softmax(dim=1).sort(dim=1, descending=True)
    before = shares.cumsum(dim=1) - shares
    taken = before < mass
    if mass >= 1:
        taken[:] = True
    taken[:, : max(1, -(-least // QUERY_BLOCK))] = True
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, order, taken)
    chosen[:, 0] = True
    return Blocks(chosen.numpy())
