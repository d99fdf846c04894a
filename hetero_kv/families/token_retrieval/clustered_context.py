"""A layer's Context on a GPU that attends to the tokens of the best clusters, and estimates the next ones (RetroInfer).

Mean keys, sums of values and sizes of all clusters, and each token's cluster, lie on the GPU, and chosen tokens in
slots. A cluster may have any number of a segment's tokens, so that more tokens can be chosen than there are slots: the
others are attended to where they lie in DRAM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.families.retrieval.device_context import CpuTurn, LayerMemory, SentToken
from hetero_kv.families.retrieval.token_slot_context import (
    TokenSlotContext,
    fetched_to_slots,
    joined_parts,
    window_parts,
)
from hetero_kv.gpu_ops.cluster_attention import PARTS, attend_to_clusters
from hetero_kv.gpu_ops.cluster_choice import ClusterBudget, choose_clusters, list_tokens, score_clusters
from hetero_kv.gpu_ops.estimated_masses import log_totals, mean_shares
from hetero_kv.gpu_ops.resident_attention import CONTEXT, SPLITS
from hetero_kv.gpu_ops.token_attention import attend_to_stored, attend_to_tokens, sum_masses
from hetero_kv.store.pool import BlockPool

#: Slots per token of as many clusters of average size as are attended to. Large clusters come first where their
#: products are alike, and tokens that are not chosen stay in slots for later ones.
SLOTS_PER_TOKEN = 2


class ClusterCounts(NamedTuple):
    """What a decoded token attended to.

    Attributes:
        tokens: Context tokens of a kv head, on average.
        read: bytes read to choose them, and of estimated values, per row.
        share: see `Chooser`'s `ContextAttention`; None where the whole Context was attended to.
    """

    tokens: float
    read: float
    share: float | None


class ClusterChoice(NamedTuple):
    """How a layer chooses clusters on a GPU.

    Attributes:
        budget: how many clusters.
        each: clusters of a block.
        block_size: tokens of a block.
        sink_blocks: blocks before the Context; clusters are numbered through the sequence.
    """

    budget: ClusterBudget
    each: int
    block_size: int
    sink_blocks: int

    @property
    def reads_blocks(self) -> bool:
        """See DeviceChoice."""
        return True

    @property
    def needs_cpu(self) -> bool:
        """See DeviceChoice."""
        return False

    def tokens(self, blocks: int) -> int:
        """Tokens of a kv head in a Context of `blocks` blocks, if clusters of average size are attended to."""
        exact, _ = self.budget.numbers(blocks * self.each)
        return min(exact * (self.block_size // self.each), blocks * self.block_size)

    def slots(self, capacity: int) -> int:
        """Slots of a kv head, in sequences of up to `capacity` blocks."""
        return min(SLOTS_PER_TOKEN * self.tokens(capacity), capacity * self.block_size)

    def context(
        self, pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> ClusteredContext:
        """See DeviceChoice."""
        return ClusteredContext(self, pool, capacity, like_keys, like_values)


class ClusteredContext(TokenSlotContext):
    """Clusters of all blocks, and slots for the tokens of chosen ones.

    Args:
        choice: how clusters are chosen.
        pool: the layer's blocks in DRAM, with the arrays of `RetroInfer`.
        capacity: the most blocks of a sequence.
        like_keys, like_values: [batch, kv_heads, any, dim], for shapes, dtype and device.
    """

    indexed = ("cluster_keys", "cluster_values", "cluster_sizes", "clusters")

    def __init__(
        self, choice: ClusterChoice, pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> None:
        self.choice = choice
        super().__init__(pool, capacity, choice.slots(capacity), like_keys, like_values)

    def sent_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """See DeviceContext."""
        heads = rows * self._slots.ids.shape[1]
        return {"taken": (heads, 1), "beyond": (heads,), "shares": (heads,)}

    def attended(
        self, call: AttentionCall, memory: LayerMemory[Any], pool: BlockPool, numbers: torch.Tensor,
        table: torch.Tensor, sent: SentToken, cpu: CpuTurn | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See DeviceContext."""
        assert sent.taken is not None
        assert sent.beyond is not None
        assert sent.shares is not None
        each, scoring = self.choice.each, (call.scale, call.softcap)
        q = call.q if call.q.stride(3) == 1 else call.q.contiguous()
        parts = window_parts(call, q, memory, numbers, sent, PARTS - SPLITS)
        number = numbers[:, CONTEXT]
        keys, sums, sizes, clusters, *of_slots = memory.context
        scores = score_clusters(q, keys, sizes, number, *scoring)
        # What a query head's clusters receive among all of them.
        totals = log_totals(scores, scores, parts.lse[:, :, :SPLITS], number if each == 1 else number * each)
        shares, _ = mean_shares(scores, scores, totals)
        best = choose_clusters(shares, number, each, self.choice.budget)
        counts = [part.view(call.k.shape[:2]) for part in (sent.taken, sent.beyond)]
        first, room = self.choice.sink_blocks * each, self._slots.ids.shape[2]
        listed = list_tokens(clusters, first, best, number, room, *counts)
        slots = fetched_to_slots(pool, table, of_slots, listed.chosen, listed.counts, sent.missed)
        attend_to_tokens(q, of_slots[-2], of_slots[-1], slots, listed.counts, *scoring, parts)
        attend_to_stored(q, pool.keys, pool.values, table, listed.beyond, listed.beyond_counts, *scoring, parts)
        rest = attend_to_clusters(scores, sums, sizes, best.estimated, best.counts, parts)
        sum_masses(parts.lse, rest, sent.shares)
        return joined_parts(call, q, parts)

    def counts(self, length: int, context: int, rows: int, sent: SentToken) -> ClusterCounts:
        """See DeviceContext. Bytes are those that the CPU would read."""
        assert sent.taken is not None
        assert sent.beyond is not None
        assert sent.shares is not None
        choice, total = self.choice, context * self.choice.each
        tokens = float(sent.taken.sum() + sent.beyond.sum()) / len(sent.missed)
        exact, estimated = choice.budget.numbers(total) if total else (0, 0)
        if exact == total:
            return ClusterCounts(tokens, 0.0, None)
        keys, sums, sizes, clusters = self._index.arrays(self.indexed)
        of_cluster = (keys[0, 0, 0].nbytes + sizes[0, 0, 0].nbytes) // choice.each
        read = total * of_cluster + context * clusters[0, 0, 0].nbytes + estimated * sums[0, 0, 0, 0].nbytes
        return ClusterCounts(tokens, float(keys.shape[1] * read), float(sent.shares.mean()))
