"""The memory of a ShadowKV layer (ShadowKV, arXiv:2410.21465, section 3.2 and figure 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetero_kv.adapter import rotary_table
from hetero_kv.adapter.footprint import (
    FOLLOWING,
    BytesPerToken,
    FootprintTerm,
    LayerFootprint,
    MemoryDemand,
    MemoryShare,
    register,
)
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.families.retrieval.footprint import write_out_share
from hetero_kv.families.shadowkv import key_factors, landmarks
from hetero_kv.families.shadowkv import layer as low_rank_layer
from hetero_kv.families.shadowkv.layout import chunk_budget, first_context_end
from hetero_kv.families.shadowkv.settings import ShadowKVSettings
from hetero_kv.families.sparse_prefill.footprint import choice_share

PARKED = register(FootprintTerm("parked", "low-rank keys that a turn may go back to (turns)", in_dram=True))
LOW_RANK = register(FootprintTerm("low_rank", "low-rank keys, landmarks and exact chunks"))


@dataclass(frozen=True, kw_only=True)
class LowRankFootprint(LayerFootprint):
    """Keys on the compute device, values in DRAM blocks of one chunk.

    Attributes:
        settings: the operator's, sized. If the rank is found from the keys, theirs is the largest possible rank, and
            the footprint is an upper bound.
        is_bound: whether it is an upper bound.
    """

    settings: ShadowKVSettings
    is_bound: bool

    @classmethod
    def of(cls, shape: KVShape, settings: ShadowKVSettings) -> LowRankFootprint:
        """The footprint of a layer with keys and values of that shape."""
        kind = settings.value_storage
        stored = BytesPerToken(values=shape.kv_heads * kind.bytes_per_vector(shape.v_dim))
        channels = shape.kv_heads * shape.k_dim
        is_bound = settings.energy(channels) is not None
        sized = settings.sized(channels)
        return cls(shape, stored=stored, block_size=sized.landmark_chunk_size, settings=sized, is_bound=is_bound)

    @property
    def place(self) -> str:
        rank = f"{self.settings.most_rank}{' at most' if self.is_bound else ''}"
        return f"with keys of rank {rank}, values in DRAM blocks of {self.block_size} tokens"

    @property
    def prefills_whole(self) -> bool:
        return True

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        yield from self.block_shares(self.context(demand.tokens), demand)
        yield MemoryShare(LOW_RANK, demand.sequences * demand.element * self.numbers(demand.tokens))
        # All layers and rows share one table of rotations.
        yield MemoryShare(LOW_RANK, demand.caches * demand.element * self.rotary(demand.tokens), common=True)
        if demand.forward_tokens < demand.tokens:
            # All of a prompt is buffered exactly until its last stride has arrived.
            yield MemoryShare(LOW_RANK, demand.batch * self.kv_bytes(demand.tokens, demand))

        yield MemoryShare(FOLLOWING, demand.batch * self.factoring(demand.tokens), common=True)
        yield choice_share(self.shape, self.settings, demand)
        if demand.on_gpu:
            if self.settings.refactor_above < 1:
                parked = self.context(demand.tokens) * self.settings.most_rank
                yield MemoryShare(PARKED, demand.batch * demand.element * parked)
            yield write_out_share(self.stored, self.shape.kv_heads * self.shape.v_dim, demand)

    def factoring(self, tokens: int) -> int:
        """Peak temporary bytes while a layer's factors and landmarks are computed; an upper bound."""
        channels = self.shape.kv_heads * self.shape.k_dim
        # Float32 tiles and intermediate results, then the Gram matrix with its decomposition in float64.
        tokens_of_tile = min(tokens, landmarks.TILE * self.settings.landmark_chunk_size)
        tiles = 5 * 4 * channels * max(tokens_of_tile, min(tokens, key_factors.TILE))
        return max(tiles, 5 * 8 * channels * channels + 4 * 4 * channels * min(tokens, key_factors.TILE))

    def context(self, tokens: int) -> int:
        """Number of prompt tokens with low-rank keys, and values in DRAM."""
        return first_context_end(tokens, self.settings)

    def numbers(self, tokens: int) -> int:
        """Numbers on the compute device, per sequence, after a prompt of `tokens` and its answer.

        They are factors, landmarks, outliers, slots of chosen chunks, exact newest tokens and spare capacity of
        buffers. The paper gives S·r + r·M + S·M/C + 2(K + O)·C·M for S tokens, M numbers of a token's keys, chunks of C
        tokens, K chosen and O outlier chunks. As printed (section 7.2) the last term lacks its M, and so does the
        derived factor 7.08: with it, keys and values of 128K tokens are 6.26 times that (M = 1024, C = 8, K = 256,
        O = 48, r = 160).
        """
        settings, context, rank = self.settings, self.context(tokens), self.settings.most_rank
        keys, values = self.shape.kv_heads * self.shape.k_dim, self.shape.kv_heads * self.shape.v_dim
        exact = (tokens - context + low_rank_layer.SLACK) * (keys + values)
        if context == 0:
            return exact
        chunk_size, chunks = settings.landmark_chunk_size, context // settings.landmark_chunk_size
        slack = low_rank_layer.SLACK if settings.project_generated else 0
        outliers = min(settings.outlier_chunks, chunks)
        chosen = min(chunk_budget(tokens, chunks, settings), chunks - outliers)
        factors = (context + slack) * rank + rank * keys
        landmarks = (chunks + slack // chunk_size) * keys
        # One extra slot takes surplus reconstructed chunks.
        resident = (outliers + chosen + 1) * chunk_size * (keys + values)
        return exact + factors + landmarks + resident

    def rotary(self, tokens: int) -> int:
        """Numbers of the rotary table that layers share, for heads that are rotated in full."""
        return (tokens + rotary_table.SLACK) * self.shape.k_dim
