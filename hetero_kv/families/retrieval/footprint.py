"""The memory of a retrieval layer: its blocks in DRAM, and on a GPU a copy of Initial and Local."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from hetero_kv.adapter.footprint import (
    MEAN_KEYS,
    RESIDENT,
    BytesPerToken,
    FootprintTerm,
    LayerFootprint,
    MemoryDemand,
    MemoryShare,
    TokenReads,
    register,
    sums_share,
)
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.cpu_ops.int4_key_scores import bytes_of_block
from hetero_kv.engine.row_buckets import rows_of_all
from hetero_kv.families.gpu_prefill.writing import PIECE_TOKENS
from hetero_kv.families.retrieval.block_choice import NONE_DERIVED, Derived
from hetero_kv.families.retrieval.device_context import DeviceChoice
from hetero_kv.families.retrieval.draft_attention import number_of_means
from hetero_kv.families.retrieval.estimated_context import EstimatedChoice, EstimatedContext
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.paged_settings import PagedSettings
from hetero_kv.families.retrieval.resident_context import ResidentChoice
from hetero_kv.families.sparse_prefill.footprint import choice_share
from hetero_kv.gpu_ops.resident_attention import NUMBERS
from hetero_kv.gpu_ops.token_attention import PARTS
from hetero_kv.gpu_ops.token_slots import TokenSlots
from hetero_kv.store.storage import FP16, StorageType

WINDOWS = register(FootprintTerm("windows", "Initial and Local of every layer"))
WRITE_OUT = register(FootprintTerm("write_out", "blocks of a prompt on their way to DRAM (prefill)"))
CHOOSING = register(FootprintTerm("choosing", "scores by which a GPU chooses single tokens (decode)"))

_FLOAT_BYTES, _ID_BYTES = 4, 8
# A token's number, or a slot's.
_NUMBER_BYTES = 4
# Float32 attention that a key received.
_ACCUMULATED_BYTES = _FLOAT_BYTES


def bytes_per_token(
    shape: KVShape, kind: StorageType, block_size: int, representative_num: int, accumulates: bool,
    derived: Derived = NONE_DERIVED, value_kind: StorageType | None = None, offset_keys: bool = False,
    representative_kind: StorageType | None = None, auxiliary_bytes: int = 0,
) -> BytesPerToken:  # fmt: skip
    """Bytes per token in DRAM blocks.

    Args:
        kind: storage type of the keys, and of the values if `value_kind` is None.
        block_size: tokens of a block.
        representative_num: representatives per block and kv head.
        accumulates: whether blocks store the attention that each key received.
        derived: which further arrays are derived from a block.
        offset_keys: whether blocks store a key offset.
        representative_kind: storage type of representatives and mean values; None for the default of `kind`.
        auxiliary_bytes: bytes per block and kv head of a method's auxiliary arrays.
    """
    represented = representative_kind or kind.for_representatives
    of_block = representative_num * represented.bytes_per_vector(shape.k_dim)
    of_block += represented.bytes_per_vector(shape.v_dim) if derived.value_means else 0
    of_block *= 2 if derived.grouped else 1
    of_block += bytes_of_block(block_size, shape.k_dim) if derived.key_codes else 0
    of_keys = FP16.bytes_per_vector(shape.k_dim) if offset_keys else 0
    received = block_size * _ACCUMULATED_BYTES if accumulates else 0
    return BytesPerToken(
        keys=shape.kv_heads * (kind.bytes_per_vector(shape.k_dim) + of_keys / block_size),
        values=shape.kv_heads * (value_kind or kind).bytes_per_vector(shape.v_dim),
        representatives=shape.kv_heads * (of_block + received + auxiliary_bytes) / block_size,
    )


def write_out_share(stored: BytesPerToken, numbers: int, demand: MemoryDemand) -> MemoryShare:
    """Two pieces of a prompt in stored form, and the `numbers` float32 per token that one piece is encoded from."""
    tokens = demand.batch * min(PIECE_TOKENS, demand.chunk_tokens, demand.tokens)
    of_token = 2 * (stored.keys + stored.values + stored.representatives) + _FLOAT_BYTES * numbers
    return MemoryShare(WRITE_OUT, math.ceil(tokens * of_token), common=True)


@dataclass(frozen=True, kw_only=True)
class PagedFootprint(LayerFootprint):
    """The memory of a layer that keeps all tokens in DRAM blocks.

    Attributes:
        device_window: tokens of Initial and Local that a GPU has a copy of; of a whole window, those beyond the
            sequence's length.
        observed: length of the observation window; at most the question's.
        index_bytes: bytes of a block's representatives that a GPU has; 0 where the CPU chooses.
        chosen: the most blocks that a GPU chooses; 0 where the CPU does.
        attends_on_cpu: whether a GPU chooses for the CPU, and has no slots.
        estimated: how a GPU chooses single tokens by estimates; None where it does not.
        packed: bytes of a key and of a value that stay packed in slots; 0 for one in the model's dtype.
        offset_bytes: bytes of a block's key offset.
        has_whole_window: whether a GPU has all tokens in its window.
        settings: the operator's; None for a dense prefill.
        needs_cpu: whether the CPU attends to some of the blocks that a GPU chooses, which notes the others then.
        resident_layout: of a layer that a GPU attends to; None where the CPU does.
        sent_queries: whether queries go to the CPU with a GPU's tokens.
    """

    block_size: int = 1
    device_window: int = 0
    observed: int = 0
    index_bytes: int = 0
    chosen: int = 0
    attends_on_cpu: bool = False
    packed: tuple[int, int] = (0, 0)
    offset_bytes: int = 0
    has_whole_window: bool = False
    settings: PagedSettings | None = None
    estimated: EstimatedChoice | None = None
    resident_layout: RetrievalLayout | None = None
    sent_queries: bool = False
    needs_cpu: bool = False

    @classmethod
    def of(
        cls, shape: KVShape, settings: PagedSettings, accumulates: bool, derived: Derived = NONE_DERIVED,
        auxiliary_bytes: int = 0, observed: int = 0, resident: DeviceChoice | None = None,
        attends_on_cpu: bool = False, has_whole_window: bool = False,
    ) -> Self:  # fmt: skip
        """The footprint of a layer with `settings`; the other arguments as for `bytes_per_token`.

        resident: how a GPU chooses blocks; None where the CPU does. attends_on_cpu: whether it chooses for the CPU.
        """
        layout = RetrievalLayout.of_settings(settings, accumulates, has_whole_window)
        block_size = settings.block_size
        kinds = settings.value_storage, settings.offset_keys, settings.representative_kind(shape.k_dim, shape.v_dim)
        counts = block_size, settings.stored_representatives, accumulates, derived
        of_index = settings.stored_representatives * kinds[2].bytes_per_vector(shape.k_dim)
        estimated = resident if isinstance(resident, EstimatedChoice) else None
        if estimated is not None:
            of_keys = block_size * settings.key_storage.bytes_per_vector(shape.k_dim)
            of_index += kinds[2].bytes_per_vector(shape.v_dim)
            of_index += bytes_of_block(block_size, shape.k_dim) if derived.key_codes else of_keys
            of_index += FP16.bytes_per_vector(shape.k_dim) if settings.offset_keys else 0
        return cls(
            shape,
            stored=bytes_per_token(shape, settings.key_storage, *counts, *kinds, auxiliary_bytes),
            block_size=block_size,
            # A GPU's copy has room for the block that is about to leave Local.
            device_window=(layout.sink_blocks + 1) * block_size + (0 if has_whole_window else layout.local_len),
            resident_layout=None if resident is None or attends_on_cpu else layout,
            sent_queries=isinstance(resident, ResidentChoice) and resident.heads > 0,
            needs_cpu=resident is not None and resident.needs_cpu,
            observed=observed,
            index_bytes=shape.kv_heads * of_index,
            chosen=resident.blocks if isinstance(resident, ResidentChoice) else 0,
            attends_on_cpu=attends_on_cpu,
            estimated=estimated,
            packed=(
                _packed_bytes(settings.key_storage, shape.k_dim),
                _packed_bytes(settings.value_storage, shape.v_dim),
            ),
            offset_bytes=shape.kv_heads * FP16.bytes_per_vector(shape.k_dim) if settings.offset_keys else 0,
            has_whole_window=has_whole_window,
            settings=settings,
        )

    @property
    def place(self) -> str:
        return f"in DRAM blocks of {self.block_size} tokens"

    @property
    def prefills_whole(self) -> bool:
        return True

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        yield from self.block_shares(math.ceil(demand.tokens / self.block_size) * self.block_size, demand)
        if demand.sparse_drafts:
            means = number_of_means(demand.tokens, self.block_size) * self.shape.kv_heads * self.shape.k_dim
            yield MemoryShare(MEAN_KEYS, demand.sequences * means * _FLOAT_BYTES)
        if demand.on_gpu:
            yield MemoryShare(WINDOWS, demand.sequences * self.kv_bytes(self.device_window, demand))
            if self.has_whole_window:
                yield MemoryShare(RESIDENT, demand.sequences * self.kv_bytes(demand.tokens, demand))
            if self.chosen:
                blocks = math.ceil(demand.tokens / self.block_size)
                of_slot = self._slot_bytes(demand) + self.shape.kv_heads * _ID_BYTES * (1 + self.needs_cpu)
                slots = 0 if self.attends_on_cpu else min(self.chosen, blocks) * of_slot
                yield MemoryShare(RESIDENT, demand.sequences * (blocks * self.index_bytes + slots))
            yield choice_share(self.shape, self.settings, demand)
            if self.estimated is not None:
                yield from self._estimated_shares(self.estimated, demand)
            if self.resident_layout is not None:
                yield from self._token_shares(self.resident_layout, demand)
            yield sums_share(min(self.observed, demand.tokens), demand.tokens, self.shape, demand)
            numbers = self.shape.kv_heads * max(self.shape.k_dim, self.shape.v_dim)
            yield write_out_share(self.stored, numbers, demand)

    def token_reads(self, tokens: int) -> TokenReads:
        """See LayerFootprint. Of estimated choices the largest counts."""
        of_token = self.stored.keys + self.stored.values
        if self.has_whole_window:
            return TokenReads(round(tokens * of_token))
        blocks = math.ceil(tokens / self.block_size)
        most = self.chosen if self.estimated is None else self.estimated.blocks
        chosen = round(min(most, blocks) * self.block_size * of_token)
        together = self.block_size if self.estimated is None else 1
        row = together * min(self.stored.keys, self.stored.values) / self.shape.kv_heads
        return TokenReads(chosen + blocks * self.index_bytes, chosen, math.ceil(row) if chosen else 0)

    def _slot_bytes(self, demand: MemoryDemand) -> int:
        """Bytes of a block in a GPU's slot."""
        return self.block_size * self.shape.kv_heads * self._token_bytes(demand) + self.offset_bytes

    def _token_bytes(self, demand: MemoryDemand) -> int:
        """Bytes of a token of a kv head in a GPU's slot."""
        (key, value), shape = self.packed, self.shape
        return (key or shape.k_dim * demand.element) + (value or shape.v_dim * demand.element)

    def _token_shares(self, layout: RetrievalLayout, demand: MemoryDemand) -> Iterator[MemoryShare]:
        """What `DeviceTokens` has for each row.

        For all layers of the layout the row's length and its blocks; for each layer addresses, and a token on its way
        to DRAM.
        """
        rows, shape, kv_heads = rows_of_all(demand.batch), self.shape, self.shape.kv_heads
        table = NUMBERS * _ID_BYTES + math.ceil(demand.tokens / self.block_size) * _NUMBER_BYTES
        yield MemoryShare(RESIDENT, rows * table, common=layout)
        # Key, value, and what is counted (`SentToken`).
        sent = kv_heads * (shape.k_dim + shape.v_dim + self._counted)
        sent += demand.heads * (shape.k_dim + 1) if self.sent_queries else 0
        yield MemoryShare(RESIDENT, rows * (self._device_arrays * _ID_BYTES + sent * _FLOAT_BYTES))

    @property
    def _device_arrays(self) -> int:
        """The number of arrays that a GPU's kernels find by addresses."""
        # Keys and values of the window and of the slots; of blocks representatives, coarse keys, places, and offsets.
        arrays = 4 + (len(EstimatedContext.indexed) + 1 + len(TokenSlots._fields) if self.estimated else 2)
        return arrays + (self.offset_bytes > 0) + self.needs_cpu

    @property
    def _counted(self) -> int:
        """The number of numbers that tell the CPU of a kv head's attention."""
        return 6 if self.estimated else 1

    def _estimated_shares(self, choice: EstimatedChoice, demand: MemoryDemand) -> Iterator[MemoryShare]:
        """The arrays by which single tokens are chosen, their slots, and what a choice computes."""
        blocks, kv_heads = math.ceil(demand.tokens / self.block_size), self.shape.kv_heads
        slots, tokens = choice.slots(blocks), blocks * self.block_size
        of_head = slots * (self._token_bytes(demand) + _NUMBER_BYTES) + (tokens + 1) * _NUMBER_BYTES
        yield MemoryShare(RESIDENT, demand.sequences * (blocks * self.index_bytes + kv_heads * of_head))
        candidates = choice.candidates(blocks)
        # Of a query head four numbers of each block, the scores of candidates' tokens, and the attention in parts; of a
        # kv head keys and shares of blocks and tokens, marks, and lists of chosen tokens and of slots.
        of_query = _FLOAT_BYTES * (4 * blocks + candidates * self.block_size + PARTS * (self.shape.v_dim + 3))
        of_list = 2 * _FLOAT_BYTES * (blocks + candidates * self.block_size) + candidates * (self.block_size + 4)
        scratch = demand.heads * of_query + kv_heads * (of_list + slots * (5 * _NUMBER_BYTES + 1))
        yield MemoryShare(CHOOSING, demand.batch * scratch, common=True)


def _packed_bytes(kind: StorageType, dim: int) -> int:
    return 0 if kind.is_plain else kind.bytes_per_vector(dim)
