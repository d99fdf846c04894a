"""FlexPrefill (arXiv:2502.20766): the fewest keys with an estimated share of the attention, chosen in every chunk."""

from __future__ import annotations

import math

import numpy as np
import torch

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.head_views import HeadView, views
from hetero_kv.families.sparse_prefill.key_lists import KeyBlocks, KeyLines

#: The paper's threshold for the square root of the Jensen-Shannon divergence.
NEAR = 0.1


def keys_of(chunk: Chunk, mass: float, least: int) -> list[KeyLines | KeyBlocks]:
    """For all rows and heads, keys with the estimated share `mass` of the attention, at least `least` tokens."""
    return [_keys(view, mass, least) for view in views(chunk)]


def _keys(view: HeadView, mass: float, least: int) -> KeyLines | KeyBlocks:
    if estimate_distance(view) < NEAR:
        return blocks_of_mass(view.block_scores(), mass, least)
    return view.lines_of_mass(mass, least)


def estimate_distance(view: HeadView) -> float:
    """How far the last queries' attention to key blocks is from its estimate by block means.

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


def blocks_of_mass(scores: torch.Tensor, mass: float, least: int) -> KeyBlocks:
    """For each query block, the fewest key blocks whose softmax reaches `mass`; always includes the sink's block.

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
    return KeyBlocks(chosen.numpy())
