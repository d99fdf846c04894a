"""A chunk of a prompt on a GPU, for sparse prefill: attention to sets of keys, and what the sets are chosen by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.gpu_ops import query_scores
from hetero_kv.gpu_ops.attention import attention_with_lse, chunk_attention, folded_heads, unfolded_heads
from hetero_kv.gpu_ops.key_sets import KeySets, block_means
from hetero_kv.gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.gpu_ops.set_attention import set_attention

#: Tokens of all rows and heads whose sets are chosen at once. Heads beyond take turns, so that the work of a long
#: context has a limit.
_TOKENS_AT_ONCE = 4 << 20
#: Bytes per such token, at most: sums, their order, ranks, masks and lists.
_BYTES_PER_TOKEN = 96
# Bytes of a key block's scores by a query block, with shares and order, and of a block's mean, per number.
_BLOCK_BYTES, _MEAN_BYTES = 64, 4

#: The sets of the first n queries of a part of a chunk's heads, from the first of these heads on.
SetsOf = Callable[["DeviceChunk", int, int], KeySets]


@dataclass(frozen=True)
class DeviceChunk:
    """The queries of a chunk, and the keys and values up to its end.

    Attributes:
        q: [batch, heads, n, k_dim], at positions first, ..., first + n - 1.
        past_k, past_v: [batch, kv_heads, past, dim].
        k, v: [batch, kv_heads, first + n - past, dim], at the positions from past on.
        scale, softcap, sink: as for `Chunk`.
        first: the position of the first query.
    """

    q: torch.Tensor
    past_k: torch.Tensor
    past_v: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float | None
    sink: torch.Tensor | None
    first: int

    @classmethod
    def of(cls, chunk: Chunk, q: torch.Tensor | None = None) -> DeviceChunk:
        """From a chunk on a GPU; q: its last queries in place of its own."""
        tensors = (chunk.q if q is None else q, chunk.past_k, chunk.past_v, chunk.k, chunk.v)
        queries, past_k, past_v, k, v = (each if each.stride(3) == 1 else each.contiguous() for each in tensors)
        first, rules = chunk.total - queries.shape[2], (chunk.scale, chunk.softcap, chunk.sink)
        return cls(queries, past_k, past_v, k, v, *rules, first)

    @property
    def n(self) -> int:
        """Queries of the chunk."""
        return self.q.shape[2]

    @property
    def total(self) -> int:
        """Tokens up to the chunk's end."""
        return self.first + self.n

    @cached_property
    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The last queries' attention summed by token and by distance, [batch, heads, total] float32 each."""
        return query_scores.attention_by_line(self.q, self.past_k, self.k, self.first, self.scale, self.softcap)

    @cached_property
    def key_means(self) -> torch.Tensor:
        """Means of all key blocks, [batch, kv_heads, key blocks, k_dim] float32."""
        return block_means(self.past_k, self.k)

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        """Scores, scaled and soft-capped, from the inner products of queries and keys."""
        scores = products * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def scores_of_means(self, vectors: torch.Tensor) -> torch.Tensor:
        """Scores of the key blocks' means [batch, heads, m, key blocks] by vectors [batch, heads, m, k_dim] float32."""
        by_kv_head = vectors.unflatten(1, (self.k.shape[1], -1)).flatten(2, 3)
        products = by_kv_head @ self.key_means.transpose(2, 3)
        return self.capped(products).reshape(*vectors.shape[:3], -1)

    def block_scores(self, n: int) -> torch.Tensor:
        """Causal scores of key blocks by the means of the first n queries' blocks: [batch, heads, blocks, key blocks].

        Float32; -inf for a block behind.
        """
        q = self.q[:, :, :n]
        scores = self.scores_of_means(block_means(q[:, :, :0], q))
        last = self.first - 1 + QUERY_BLOCK * torch.arange(1, scores.shape[2] + 1, device=q.device)
        begin = QUERY_BLOCK * torch.arange(scores.shape[3], device=q.device)
        return scores.masked_fill_(begin > last[:, None], float("-inf"))

    def matched_blocks(self, sets: KeySets, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key blocks that a query block matches best by keys outside the tokens and offsets of `sets`.

        Returns [batch, heads, query blocks, at most count] int32, best first, and how many there are,
        [batch, heads, query blocks] int32.
        """
        q = self.q[:, :, : sets.n]
        shares = query_scores.unseen_attention(q, self.past_k, self.k, sets, self.scale, self.softcap)
        best = shares.topk(min(count, shares.shape[3]), dim=3)
        return best.indices.int(), (best.values > float("-inf")).sum(dim=3, dtype=torch.int32)

    def attention(self, sets_of: SetsOf, whole: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention to the keys in the sets that `sets_of` chooses, in parts of the heads.

        whole: the number of last queries that attend to all keys; the rest of their query blocks does so too.

        Returns out [batch, heads, n, v_dim], lse [batch, heads, n] float32 and attended [batch, heads, query blocks]
        int32, the number of keys that a query block attends to; all on the device.
        """
        n = (self.n - min(whole, self.n)) // QUERY_BLOCK * QUERY_BLOCK if whole else self.n
        results = []
        if n:
            parts = [self._part_attention(part, sets_of, n, first_head) for first_head, part in self._parts()]
            results.append(_joined(parts, dim=1))
        if n < self.n:
            results.append(self._last_to_all(n))
        return _joined(results, dim=2)

    def _part_attention(
        self, part: DeviceChunk, sets_of: SetsOf, n: int, first_head: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sets = sets_of(part, n, first_head)
        kept = part.past_k, part.past_v, part.k, part.v
        return set_attention(part.q[:, :, :n], *kept, sets, self.scale, self.softcap, part.sink)

    def _parts(self) -> Iterator[tuple[int, DeviceChunk]]:
        """Parts of the heads, each with the number of its first head."""
        kv_heads = self.k.shape[1]
        group = self.q.shape[1] // kv_heads
        at_once = heads_at_once(self.q.shape[0], self.total, group, kv_heads)
        for first in range(0, kv_heads, at_once):
            own, queries = slice(first, first + at_once), slice(first * group, (first + at_once) * group)
            kept = {name: getattr(self, name)[:, own] for name in ("past_k", "past_v", "k", "v")}
            sink = None if self.sink is None else self.sink[queries]
            yield first * group, replace(self, q=self.q[:, queries], sink=sink, **kept)

    def _last_to_all(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `attention`, of the queries from the n-th on to all keys, without a copy of the keys."""
        q, past = self.q[:, :, n:], self.past_k.shape[2]
        before, own = slice(0, self.first + n - past), slice(self.first + n - past, None)
        k, v, rules = self.k, self.v, (self.scale, self.softcap)
        out, lse = chunk_attention(q, k[:, :, before], v[:, :, before], k[:, :, own], v[:, :, own], *rules)
        if past:
            found = attention_with_lse(folded_heads(q, k.shape[1]), self.past_k, self.past_v, *rules)
            out, lse = merge_attention(out, lse, *unfolded_heads(q, *found))
        if self.sink is not None:
            out, lse = apply_sink(out, lse, self.sink)
        ends = torch.arange(self.first + n, self.total, QUERY_BLOCK, dtype=torch.int32, device=q.device) + QUERY_BLOCK
        return out, lse, ends.clamp_(max=self.total).expand(*q.shape[:2], -1)


def _joined(
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if len(parts) == 1:
        return parts[0]
    out, lse, attended = (torch.cat(each, dim=dim) for each in zip(*parts, strict=True))
    return out, lse, attended


def heads_at_once(batch: int, tokens: int, group: int, kv_heads: int) -> int:
    """Kv heads, at least one, whose query heads choose their sets at once in a context of `tokens`."""
    return min(kv_heads, max(1, _TOKENS_AT_ONCE // (batch * tokens * group)))


def working_bytes(n: int, tokens: int, batch: int, heads: int, shape: KVShape, element: int) -> int:
    """Upper bound of the GPU memory that a chunk of `n` queries takes to choose sets among `tokens`, bytes.

    element: bytes of a number of queries and results, whose parts are joined.
    """
    kv_heads = shape.kv_heads
    together = batch * heads_at_once(batch, tokens, heads // kv_heads, kv_heads) * heads // kv_heads
    blocks, key_blocks = -(-n // QUERY_BLOCK), -(-tokens // QUERY_BLOCK)
    means = batch * shape.k_dim * (kv_heads * key_blocks + heads * blocks)
    results = batch * heads * n * shape.v_dim * element
    return together * (tokens * _BYTES_PER_TOKEN + blocks * key_blocks * _BLOCK_BYTES) + means * _MEAN_BYTES + results
