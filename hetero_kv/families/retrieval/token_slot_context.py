"""A layer's Context on a GPU that attends to single tokens, which lie in slots.

A block would take several times the memory of its few chosen tokens, and as many more bytes would cross the bus. A key
of 128 numbers in half precision is 256 bytes, whole transactions of the bus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.families.retrieval.block_index import BlockIndex
from hetero_kv.families.retrieval.device_context import DeviceContext, LayerMemory, SentToken
from hetero_kv.gpu_ops.resident_attention import attend
from hetero_kv.gpu_ops.row_memory import Memory
from hetero_kv.gpu_ops.slot_formats import Slots
from hetero_kv.gpu_ops.token_attention import Parts
from hetero_kv.gpu_ops.token_slots import NONE, TokenSlots, fetch_tokens, place_tokens
from hetero_kv.gpu_ops.window_step import join_parts
from hetero_kv.store.pool import BlockPool


class TokenSlotContext(DeviceContext):
    """The arrays by which tokens are chosen, and slots for single tokens.

    Args:
        pool: the layer's blocks in DRAM.
        capacity: the most blocks of a sequence.
        slots: of each kv head.
        like_keys, like_values: [batch, kv_heads, any, dim], for shapes, dtype and device.
    """

    def __init__(
        self, pool: BlockPool, capacity: int, slots: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> None:
        (batch, kv_heads), device = like_keys.shape[:2], like_keys.device
        super().__init__(BlockIndex(pool, self.indexed, capacity, batch, device))
        self._block_size = pool.block_size
        self._slots = TokenSlots.empty(batch, kv_heads, slots, capacity * pool.block_size, device)
        # Plain numbers in the model's dtype, packed ones as they are stored.
        of_keys = like_keys.dtype if pool.key_storage.is_plain else pool.keys.dtype
        of_values = like_values.dtype if pool.value_storage.is_plain else pool.values.dtype
        of_slots = batch, kv_heads, slots
        self._keys = like_keys.new_zeros(*of_slots, pool.keys.shape[3], dtype=of_keys)
        self._values = like_values.new_zeros(*of_slots, pool.values.shape[3], dtype=of_values)

    @property
    def _slot_arrays(self) -> list[torch.Tensor]:
        return [*self._slots, self._keys, self._values]

    def _set_slot_arrays(self, arrays: list[torch.Tensor]) -> None:
        *slots, self._keys, self._values = arrays
        self._slots = TokenSlots(*slots)

    def _forget_from(self, context: int) -> None:
        ids = self._slots.ids
        ids.masked_fill_(ids >= context * self._block_size, NONE)

    def empty_slots(self) -> None:
        """See DeviceContext."""
        self._slots.ids.fill_(NONE)

    def missed_bytes(self, pool: BlockPool) -> int:
        """See DeviceContext."""
        return pool.keys[0, 0, 0].nbytes + pool.values[0, 0, 0].nbytes


def window_parts(
    call: AttentionCall, q: torch.Tensor, memory: LayerMemory[Any], numbers: torch.Tensor, sent: SentToken, further: int
) -> Parts:
    """Put a token into its window, and attend to that; other kernels write `further` parts.

    q: the call's queries, contiguous in their last dimension. The other arguments as for `DeviceContext.attended`.
    """
    no_ids = q.new_empty((*call.k.shape[:2], 0), dtype=torch.int64)
    no_slots = Slots(*(q.new_empty((*no_ids.shape, 1, each.shape[3])) for each in (call.k, call.v)))
    places = memory.window, memory.initial, no_ids, no_slots, numbers
    return Parts(*attend(q, call.k, call.v, *places, call.scale, call.softcap, (sent.key, sent.value), further))


def joined_parts(call: AttentionCall, q: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of all parts, as `DeviceContext.attended` returns it."""
    out = q.new_empty(*q.shape[:3], call.v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    join_parts(*parts, None, None, out, lse)
    return out, lse


def fetched_to_slots(
    pool: BlockPool, table: torch.Tensor, memory: Sequence[Memory], chosen: torch.Tensor, counts: torch.Tensor,
    missed: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Read chosen tokens into their slots, those that are in none.

    Args:
        memory: as `TokenSlotContext` has it, of the slots.
        chosen, counts, missed: as for `gpu_ops.token_slots.place_tokens_in_torch`.

    Returns the slot of each chosen token, [batch, kv_heads, n] int32.
    """
    *slots, keys, values = memory
    at, misses, into = place_tokens(TokenSlots(*slots), chosen, counts, missed)
    for stored, kept in ((pool.keys, keys), (pool.values, values)):
        fetch_tokens(stored, table, misses, into, missed, kept)
    return at
