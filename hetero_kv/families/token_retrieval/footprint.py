"""The memory of a layer whose clusters a GPU chooses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hetero_kv.adapter.footprint import RESIDENT, MemoryDemand, MemoryShare, TokenReads
from hetero_kv.families.retrieval.footprint import CHOOSING, PagedFootprint
from hetero_kv.families.token_retrieval.clustered_context import ClusterChoice, ClusteredContext
from hetero_kv.gpu_ops.cluster_attention import PARTS
from hetero_kv.gpu_ops.cluster_choice import most_beyond, most_estimated
from hetero_kv.gpu_ops.token_slots import TokenSlots

_FLOAT_BYTES = _NUMBER_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ClusteredFootprint(PagedFootprint):
    """The memory of a layer of token retrieval.

    Attributes:
        clusters: how a GPU chooses them; None where the CPU chooses, or nobody.
    """

    clusters: ClusterChoice | None = None

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        yield from super().shares(demand)
        if demand.on_gpu and self.clusters is not None:
            yield from self._clustered_shares(self.clusters, demand)

    def token_reads(self, tokens: int) -> TokenReads:
        """See LayerFootprint. Clusters count as of average size."""
        if self.clusters is None:
            return super().token_reads(tokens)
        of_token, blocks = self.stored.keys + self.stored.values, math.ceil(tokens / self.block_size)
        chosen = round(self.clusters.tokens(blocks) * of_token)
        row = math.ceil(min(self.stored.keys, self.stored.values) / self.shape.kv_heads)
        return TokenReads(chosen + blocks * self.index_bytes, chosen, row)

    @property
    def _device_arrays(self) -> int:
        if self.clusters is None:
            return super()._device_arrays
        # Keys and values of the window and of the slots.
        return 4 + len(ClusteredContext.indexed) + len(TokenSlots._fields)

    @property
    def _counted(self) -> int:
        # Tokens that were missing, in slots, and in none, and a share.
        return super()._counted if self.clusters is None else 4

    def _clustered_shares(self, choice: ClusterChoice, demand: MemoryDemand) -> Iterator[MemoryShare]:
        """Clusters and each token's cluster, slots for single tokens, and what a choice computes."""
        blocks, kv_heads = math.ceil(demand.tokens / self.block_size), self.shape.kv_heads
        slots, tokens, clusters = choice.slots(blocks), blocks * self.block_size, blocks * choice.each
        of_head = slots * (self._token_bytes(demand) + _NUMBER_BYTES) + (tokens + 1) * _NUMBER_BYTES
        yield MemoryShare(RESIDENT, demand.sequences * (blocks * self.index_bytes + kv_heads * of_head))
        # Of a query head scores, their sums, and the attention in parts; of a kv head keys and shares, marks, a list of
        # clusters, and lists of tokens and of slots.
        of_query = _FLOAT_BYTES * (clusters + 3 + PARTS * (self.shape.v_dim + 3))
        lists = most_estimated(choice.budget, clusters) + most_beyond(tokens, slots) + 4 * slots + tokens // 16 + 8
        of_list = clusters * (2 * _FLOAT_BYTES + 1) + _NUMBER_BYTES * lists + slots * (_NUMBER_BYTES + 1)
        yield MemoryShare(CHOOSING, demand.batch * (demand.heads * of_query + kv_heads * of_list), common=True)
