"""The attention that keys of blocks have received, summed up until a block is finalized."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.pending_queries import NO_PENDING_QUERIES, PendingQueries
from hetero_kv.families.retrieval.prefill_representatives import PrefillRepresentativesLayer
from hetero_kv.families.retrieval.state import RetrievalState
from hetero_kv.gpu_ops.column_sums import column_sums
from hetero_kv.gpu_ops.staging import Staging


class AccumulatingLayer(PrefillRepresentativesLayer):
    """A cache layer whose `state` sums up the attention that keys of blocks which are not finalized have received."""

    layout: RetrievalLayout
    state: RetrievalState
    staging: Staging | None
    #: Decoded queries whose attention is not yet added to what the keys have received.
    pending: PendingQueries
    scale: float
    softcap: float | None

    def accumulate(self, received: torch.Tensor, start: int) -> None:
        """Add attention that keys received: [batch, kv_heads, tokens] float32, for the positions from `start` on.

        Finalized blocks have their representatives and no longer need it, so their part is ignored.
        """
        first = self.state.open_start
        new = received[:, :, max(0, first - start) :]
        offset, old = max(0, start - first), self.state.accumulated
        width = max(offset + new.shape[2], 0 if old is None else old.shape[2])
        total = new.new_zeros(*new.shape[:2], width)
        if old is not None:
            total[:, :, : old.shape[2]] = old
        total[:, :, offset : offset + new.shape[2]] += new
        self.state = replace(self.state, accumulated=total)

    def remember(self, past: int, scale: float, softcap: float | None, q: np.ndarray, lse: np.ndarray) -> None:
        """Add the query of the token at `past` to the pending queries.

        q: [batch, heads, k_dim] float32. lse: [batch, heads] float32, its log-sum-exp, which may be filled later.
        """
        self.scale, self.softcap = scale, softcap
        # Accumulating once per block's length costs a step little and keeps few queries in memory. The present query
        # stays out of this batch: a device may not have sent its log-sum-exp yet.
        if self.pending.count >= self.layout.block_size:
            self.accumulate_pending(past)
        self.pending = self.pending.grown(q, lse)

    def accumulate_pending(self, length: int) -> None:
        """Add the attention of the pending queries to the generated tokens, whose representatives depend on it.

        `length` is the number of tokens that the last of these queries saw.
        """
        if not self.pending.count:
            return
        self._settle()
        q, lse = (torch.from_numpy(part) for part in self.pending.stacked())
        self.pending = NO_PENDING_QUERIES
        group, layout = self.group, self.layout
        start = max(group.finalized[layout], group.prompt_length // layout.block_size) * layout.block_size
        keys = self.read_keys(start, length)
        self.accumulate(column_sums(q, lse, keys, self.scale, self.softcap).sum(dim=2), start)

    def take_accumulated(self, first: int, end: int) -> torch.Tensor:
        """Move the accumulated attention of the blocks [first, end), which are being finalized, to the pool.

        `first` is the first block that is not finalized. Returns [rows, end - first, kv_heads, block_size] float32.
        """
        pool, block_size = self.pool, self.layout.block_size
        assert pool is not None
        assert pool.accumulated is not None
        rows, kv_heads, tokens = len(self.group.sequences), pool.keys.shape[1], (end - first) * block_size
        taken = torch.zeros(rows, kv_heads, tokens)
        old = self.state.accumulated
        if old is not None:
            taken[:, :, : min(tokens, old.shape[2])] = old[:, :, :tokens]
            old = old[:, :, tokens:]
        self.state = replace(self.state, accumulated=old, open_start=end * block_size)
        by_block = taken.unflatten(2, (end - first, block_size)).transpose(1, 2)
        for row, blocks in enumerate(by_block):
            pool.accumulated[torch.from_numpy(self.block_ids(row)[first:end].astype(np.int64))] = blocks
        return by_block

    def read_keys(self, start: int, stop: int) -> torch.Tensor:
        """Stored keys of the positions [start, stop), decoded: [batch, kv_heads, stop - start, k_dim]."""
        assert self.pool is not None
        rows = range(len(self.group.sequences))
        return torch.stack([self.pool.read_keys(self.block_ids(row), start, stop) for row in rows])

    def _settle(self) -> None:
        """Wait for the log-sum-exp of the newest pending query, if the device has not sent it yet."""
        if self.staging is not None:
            self.staging.settle()
