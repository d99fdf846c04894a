"""A chunk of a prompt for sparse prefill: new tokens, the tokens before them, and attention to chosen keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.families.sparse_prefill.key_lists import KeyBlocks, KeyLines, runs_of
from hetero_kv.gpu_ops.chosen_keys import block_means, chosen_attention


@dataclass(frozen=True)
class Chunk:
    """New tokens after `past` earlier ones.

    Attributes:
        q: [batch, heads, n, k_dim].
        past_k, past_v: [batch, kv_heads, past, dim].
        k, v: [batch, kv_heads, n, dim].
        scale, softcap: of the scores.
        sink: [heads], scores of learned sinks; None: none.
    """

    q: torch.Tensor
    past_k: torch.Tensor
    past_v: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float | None
    sink: torch.Tensor | None = None

    @property
    def past(self) -> int:
        """Tokens before the chunk."""
        return self.past_k.shape[2]

    @property
    def n(self) -> int:
        """Tokens of the chunk."""
        return self.q.shape[2]

    @property
    def total(self) -> int:
        """Tokens up to the chunk's end."""
        return self.past + self.n

    @property
    def query_blocks(self) -> int:
        """The number of query blocks."""
        return -(-self.n // QUERY_BLOCK)

    @property
    def mean_keys(self) -> float:
        """Keys that a query block can attend to, the mean over blocks."""
        stops = self.past + np.minimum(QUERY_BLOCK * np.arange(1, self.query_blocks + 1), self.n)
        return float(stops.mean())

    @cached_property
    def key_means(self) -> torch.Tensor:
        """Means of all key blocks, [batch, kv_heads, key blocks, k_dim] float32."""
        return block_means(self.past_k, self.k, QUERY_BLOCK)

    def capped(self, products: torch.Tensor) -> torch.Tensor:
        """Scores, scaled and soft-capped, from the inner products of queries and keys."""
        scores = products * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def kv_head(self, head: int) -> int:
        """The kv head of a query head."""
        return head // (self.q.shape[1] // self.k.shape[1])

    def first(self, n: int) -> Chunk:
        """The first n tokens as a chunk."""
        q, k, v = (each[:, :, :n] for each in (self.q, self.k, self.v))
        return Chunk(q, self.past_k, self.past_v, k, v, self.scale, self.softcap, self.sink)

    def last(self, n: int) -> Chunk:
        """The last n tokens as a chunk."""
        before, own = slice(None, -n), slice(-n, None)
        past_k, past_v = (
            torch.cat([past, new[:, :, before]], dim=2) if n < self.n else past
            for past, new in ((self.past_k, self.k), (self.past_v, self.v))
        )
        q, k, v = (each[:, :, own] for each in (self.q, self.k, self.v))
        return Chunk(q, past_k, past_v, k, v, self.scale, self.softcap, self.sink)

    def seen_by(self, q: torch.Tensor) -> Chunk:
        """The last n tokens as a chunk, with the queries q [batch, heads, n, k_dim]; n may exceed `self.n`."""
        before = q.shape[2] - self.n
        if before <= 0:
            return self.last(q.shape[2])
        (past_k, k), (past_v, v) = (
            (past[:, :, :-before], torch.cat([past[:, :, -before:], new], dim=2))
            for past, new in ((self.past_k, self.k), (self.past_v, self.v))
        )
        return Chunk(q, past_k, past_v, k, v, self.scale, self.softcap, self.sink)

    def attention(
        self, heads: list[KeyLines | KeyBlocks], whole: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Attention to the keys in `heads`, which lists those of each row's heads in turn.

        whole: see `runs_of`.

        Returns out [batch, heads, n, v_dim], lse [batch, heads, n] and tokens [batch, heads] float64, the mean number
        that a query block attends to.
        """
        runs, starts = runs_of(heads, self.past, self.n, whole)
        out, lse = chosen_attention(
            self.q, self.past_k, self.past_v, self.k, self.v, runs, starts, self.scale, self.softcap, self.sink
        )
        by_head = np.add.reduceat(runs[:, 1] - runs[:, 0], starts[: -1 : self.query_blocks], dtype=np.int64)
        return out, lse, by_head.reshape(self.q.shape[:2]) / self.query_blocks
