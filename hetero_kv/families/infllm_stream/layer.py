"""The cache layer of InfLLM's stream: computes blocks' representatives, and retrieves blocks, during a prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import pad

from hetero_kv.families.gpu_prefill.pieces import stored_blocks
from hetero_kv.families.retrieval.pending_queries import NO_PENDING_QUERIES
from hetero_kv.families.self_extend.layer import SelfExtendLayer
from hetero_kv.gpu_ops.host_copies import on_device, on_host

# Blocks per computation of representatives: bounds the float32 copy of their keys.
_REPRESENTED_AT_ONCE = 64


class InfLLMStreamLayer(SelfExtendLayer):
    """A layer that computes a block's representatives as soon as the window has passed it, even within a prompt."""

    _represented: torch.Tensor | None = None

    def record_neighbours(self, q: torch.Tensor, start: int, keys: torch.Tensor, first: int) -> None:
        """See SelfExtendLayer: adds the products of keys with the window's later queries."""
        if self.accumulates:
            (scores,) = on_host(local_scores(q, start, keys, first, self.positions.neighbours))
            self.accumulate(scores, first)

    def accumulate_pending(self, length: int) -> None:
        """Add the products of the pending queries; `length` is the number of tokens that the last of them saw."""
        if not self.pending.count:
            return
        assert self.rotary is not None
        positions, rotary = self.positions, self.rotary
        grouped = torch.from_numpy(self.pending.stacked()[0])
        start = length - self.pending.count
        self.pending = NO_PENDING_QUERIES
        first = max(self.state.open_start, start - positions.neighbours + 1)
        keys, q = (on_device(part, rotary.cos.device) for part in (self.read_keys(first, length), grouped))
        q = positions.neighbouring_queries(q, start, rotary)
        self.record_neighbours(q, start, positions.neighbouring_keys(keys, first, rotary), first)

    def representatives_before(self, end: int, vectors_of: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Representatives of the Context's blocks before block `end` of the sequence being prefilled.

        vectors_of: `representatives.Representing`. Returns [batch, kv_heads, blocks, k_dim] float32.
        """
        size, sink = self.layout.block_size, self.layout.sink_blocks
        parts = [] if self._represented is None else [self._represented]
        done = sink + sum(part.shape[2] for part in parts)
        stored = max(done, min(end, self.state.open_start // size))
        if done < stored:
            parts.append(self._stored_representatives(done, stored))
        parts += [
            self._new_representatives(first, min(first + _REPRESENTED_AT_ONCE, end), vectors_of)
            for first in range(stored, end, _REPRESENTED_AT_ONCE)
        ]
        self._represented = torch.cat(parts, dim=2)
        return self._represented[:, :, : end - sink]

    def _stored_representatives(self, first: int, end: int) -> torch.Tensor:
        """Representatives of the blocks [first, end), computed before this prompt."""
        assert self.pool is not None
        assert self.prefill_buffer is not None
        tables = [self.block_ids(row)[first:end].astype(np.int64) for row in range(len(self.group.sequences))]
        stored = torch.stack([self.pool.representatives[torch.from_numpy(table)] for table in tables])
        vectors = self.pool.representative_storage.decode(stored).float()
        return on_device(vectors.squeeze(3).transpose(1, 2), self.prefill_buffer.keys.device)

    def _new_representatives(self, first: int, end: int, vectors_of: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Representatives of the blocks [first, end), which this prompt's queries have passed."""
        buffer, accumulated, size = self.prefill_buffer, self.state.accumulated, self.layout.block_size
        assert buffer is not None
        assert accumulated is not None
        keys = buffer.keys[:, :, first * size - buffer.first : end * size - buffer.first]
        scores = accumulated[:, :, first * size - self.state.open_start :][:, :, : keys.shape[2]]
        scores = on_device(scores, keys.device)
        keys, scores = (part.unflatten(2, (end - first, size)).transpose(1, 2) for part in (keys, scores))
        vectors = vectors_of(keys.flatten(0, 1).float(), scores.flatten(0, 1))
        return vectors.squeeze(2).unflatten(0, (len(keys), end - first)).transpose(1, 2)

    def of_blocks(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of Initial and of Context blocks, from the buffer, or from the pool if the buffer lacks them.

        chosen: positions in the Context, [batch, lists, blocks]; lists is 1 if all kv heads choose together.

        Returns [batch, kv_heads, tokens, dim] each.
        """
        buffer, size, sink = self.prefill_buffer, self.layout.block_size, self.layout.sink_blocks
        assert buffer is not None
        initial = torch.arange(sink, device=chosen.device).expand(*chosen.shape[:2], -1)
        blocks = torch.cat([initial, chosen + sink], dim=2).expand(*buffer.keys.shape[:2], -1)
        apart = buffer.first // size
        starts = (blocks - apart).clamp(min=0).unsqueeze(3) * size
        tokens = (starts + torch.arange(size, device=chosen.device)).flatten(2).unsqueeze(3)
        keys, values = (
            part.gather(2, tokens.expand(-1, -1, -1, part.shape[3])) for part in (buffer.keys, buffer.values)
        )
        if not apart:
            return keys, values
        is_apart = (blocks < apart).repeat_interleave(size, dim=2).unsqueeze(3)
        stored_keys, stored_values = self._stored_blocks(blocks.clamp(max=apart - 1), keys)
        return torch.where(is_apart, stored_keys, keys), torch.where(is_apart, stored_values, values)

    def _stored_blocks(self, blocks: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored keys and values of each kv head's blocks [batch, kv_heads, blocks], in the form of `of_blocks`.

        They pass through page-locked memory to the GPU of `like`, and have its dtype.
        """
        assert self.pool is not None
        (on_cpu,) = on_host(blocks)
        ids = [torch.from_numpy(self.block_ids(row).astype(np.int64))[heads] for row, heads in enumerate(on_cpu)]
        return stored_blocks(self.pool, torch.stack(ids), like.dtype, self.group.store.prefetch(like.device))

    def leave_prefill(self) -> None:
        super().leave_prefill()
        self._represented = None

    def reopen(self) -> None:
        """See FamilyLayer: keeps all representatives, which do not depend on the question."""


def local_scores(q: torch.Tensor, start: int, keys: torch.Tensor, first: int, window: int) -> torch.Tensor:
    """The sum of each key's products with the later queries that have it among their last `window` keys.

    Args:
        q: [batch, heads, n, k_dim], queries from position `start` on.
        keys: [batch, kv_heads, m, k_dim], for the positions from `first` on.

    Returns [batch, kv_heads, m] float32. InfLLM's representative score (section 3.2), times the number of queries.
    """
    n = q.shape[2]
    sums = q.float().unflatten(1, (keys.shape[1], -1)).sum(dim=2).cumsum(dim=2)
    sums = pad(sums, (0, 0, 1, 0))
    at = torch.arange(first, first + keys.shape[2], device=keys.device) - start
    seen_by = sums[:, :, (at + window).clamp(0, n)] - sums[:, :, (at + 1).clamp(0, n)]
    return (seen_by * keys.float()).sum(dim=3)
