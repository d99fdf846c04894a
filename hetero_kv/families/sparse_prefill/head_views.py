"""Estimates which keys a chunk's heads attend to, from last queries or block means, and chooses keys by it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.cpu_ops.qk_tile import QUERY_COLUMNS
from hetero_kv.cpu_ops.vertical_slash_scores import distances_within
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.key_lists import ALWAYS_NEAR, KeyBlocks, KeyLines, runs_of
from hetero_kv.gpu_ops.chosen_keys import attention_by_line, best_matched_blocks, block_means

#: Last queries of a chunk from which tokens and distances are chosen.
LAST_QUERIES = QUERY_COLUMNS


class LastQueries:
    """The last queries of one row's heads that share a kv head; their attention is computed for all of them at once.

    Args:
        chunk, row: the chunk, and which of its rows.
        heads: the query heads, all of one kv head.
    """

    def __init__(self, chunk: Chunk, row: int, heads: Sequence[int]) -> None:
        self._chunk, self._row, self._heads = chunk, row, list(heads)
        self._sums: tuple[np.ndarray, np.ndarray] | None = None

    def sums(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """A head's attention summed by token and by distance, [tokens] float32 each."""
        if self._sums is None:
            chunk, place = self._chunk, (self._row, self._chunk.kv_head(self._heads[0]))
            q = chunk.q[self._row, self._heads, -min(LAST_QUERIES, chunk.n) :]
            self._sums = attention_by_line(q, chunk.past_k[place], chunk.k[place], chunk.scale, chunk.softcap)
        by_token, by_distance = self._sums
        return by_token[self._heads.index(head)], by_distance[self._heads.index(head)]


class HeadView:
    """Estimates of the attention of one row and head of a chunk, from its last queries or from block means.

    Args:
        chunk, row, head: the chunk, and which of its rows and heads.
        last: its last queries, possibly shared with other heads; None to create them for this head alone.
    """

    def __init__(self, chunk: Chunk, row: int, head: int, last: LastQueries | None = None) -> None:
        self.chunk, self.row, self.head, self.kv_head = chunk, row, head, chunk.kv_head(head)
        self._last = last or LastQueries(chunk, row, [head])

    @property
    def queries(self) -> int:
        """The number of last queries."""
        return min(LAST_QUERIES, self.chunk.n)

    @property
    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """The last queries' attention summed by token and by distance, [tokens] float32 each."""
        return self._last.sums(self.head)

    def lines_within(self, tokens: int, band_tokens: int) -> KeyLines:
        """The `tokens` best tokens, and the best distances, by which a query block sees `band_tokens` tokens."""
        by_token, by_distance = self.sums
        ranked = _ranked(by_distance, band_tokens)
        return KeyLines.of(_best(by_token, tokens), distances_within(ranked, QUERY_BLOCK, ALWAYS_NEAR, band_tokens))

    def lines_of_mass(self, mass: float, least: int) -> KeyLines:
        """The fewest tokens, and the fewest distances, each with this share of the last queries' attention.

        least: the minimum number of tokens, and of tokens that a query block sees by its distances. The latter matters
            because a token that the last queries attend to may come after an earlier query block.
        """
        by_token, by_distance = self.sums
        seen = distances_within(_ranked(by_distance, least), QUERY_BLOCK, ALWAYS_NEAR, least)
        return KeyLines.of(_fewest(by_token, mass, least), np.union1d(_fewest(by_distance, mass), seen))

    @property
    def key_means(self) -> torch.Tensor:
        """Means of the key blocks of the head, [key blocks, k_dim] float32."""
        return self.chunk.key_means[self.row, self.kv_head]

    def block_scores(self) -> torch.Tensor:
        """Causal scores of key blocks by the means of query blocks, [query blocks, key blocks] float32."""
        chunk = self.chunk
        q = chunk.q[self.row, self.head]
        scores = chunk.capped(block_means(q[:0], q, QUERY_BLOCK) @ self.key_means.T)
        first = chunk.past + QUERY_BLOCK * torch.arange(chunk.query_blocks)
        behind = QUERY_BLOCK * torch.arange(scores.shape[1]) > (first + QUERY_BLOCK - 1)[:, None]
        return scores.masked_fill_(behind, float("-inf"))


def views(chunk: Chunk, by_line: Collection[int] | None = None) -> list[HeadView]:
    """The heads of all rows in turn. by_line: the heads whose last queries are needed; None for all."""
    rows, heads = chunk.q.shape[:2]
    looked_at = range(heads) if by_line is None else by_line
    found = []
    for row in range(rows):
        shared = {
            kv_head: LastQueries(chunk, row, [head for head in looked_at if chunk.kv_head(head) == kv_head])
            for kv_head in range(chunk.k.shape[1])
        }
        found += [
            HeadView(chunk, row, head, shared[chunk.kv_head(head)] if head in looked_at else None)
            for head in range(heads)
        ]
    return found


def with_matched_blocks(chunk: Chunk, keys: Sequence[KeyLines | KeyBlocks], count: int) -> list[KeyLines | KeyBlocks]:
    """Add `count` key blocks for each query block to the heads whose keys are lines.

    `keys` lists all rows' heads in turn. The added blocks best match some queries of the query block, among those that
    it does not see already.
    """
    found, (_, heads) = list(keys), chunk.q.shape[:2]
    for first in range(0, len(found), heads):
        row = first // heads
        for kv_head in range(chunk.k.shape[1]):
            those = [
                head for head in range(heads)
                if chunk.kv_head(head) == kv_head and isinstance(found[first + head], KeyLines)
            ]  # fmt: skip
            if not those:
                continue
            place = row, kv_head
            runs, starts = runs_of([found[first + head] for head in those], chunk.past, chunk.n)
            # Adjacent heads need no copy.
            are_neighbours = those[-1] - those[0] + 1 == len(those)
            own = chunk.q[row]
            q = own[those[0] : those[-1] + 1] if are_neighbours else torch.stack([own[head] for head in those])
            matched = best_matched_blocks(
                q, chunk.past_k[place], chunk.k[place], runs, starts, count, chunk.scale,
                chunk.softcap,
            )  # fmt: skip
            for head, blocks in zip(those, matched, strict=True):
                lines = found[first + head]
                assert isinstance(lines, KeyLines)
                found[first + head] = replace(lines, blocks=blocks)
    return found


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values."""
    count = min(count, values.size)
    return np.argpartition(values, values.size - count)[values.size - count :] if count else np.empty(0, np.int64)


def _ranked(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values, largest first."""
    best = _best(values, count)
    return best[np.argsort(-values[best], kind="stable")]


def _fewest(values: np.ndarray, mass: float, least: int = 0) -> np.ndarray:
    """Indices of the fewest values with this share of their sum, at least `least` of them."""
    order = np.argsort(-values, kind="stable")
    if mass >= 1:
        return order
    needed = int(np.searchsorted(np.cumsum(values[order], dtype=np.float64), mass * values.sum())) + 1
    return order[: max(needed, least)]
