"""A layer's Context whose chosen blocks a GPU and the CPU attend to at once.

The GPU attends to the blocks that lie in its slots. Of the others it reads a share over the bus first, and the CPU
attends to the rest where they lie, meanwhile. The bus brings these to the slots afterwards, behind the layers that
follow, so that a block that is chosen again is in a slot.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.families.retrieval.device_context import CpuTurn, LayerMemory, SentToken
from hetero_kv.families.retrieval.resident_context import ResidentChoice, ResidentContext
from hetero_kv.gpu_ops.resident_attention import CONTEXT, attend
from hetero_kv.gpu_ops.resident_slots import NONE, divided
from hetero_kv.gpu_ops.side_stream import stream_for, wait_for
from hetero_kv.gpu_ops.slot_formats import Slots
from hetero_kv.gpu_ops.window_step import join_parts
from hetero_kv.store.pool import BlockPool

#: The purpose of the stream on which blocks are read that the CPU has attended to.
LATE = "late blocks"


class SplitChoice(ResidentChoice):
    """How a layer chooses blocks that a GPU and the CPU attend to; `bus_share` is a number."""

    __slots__ = ()

    def context(
        self, pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> SplitContext:
        """See ResidentChoice."""
        return SplitContext(self, pool, capacity, like_keys, like_values)


class SplitContext(ResidentContext):
    """As ResidentContext, and which slots the GPU attends to.

    What is read late arrives before the forward ends (`device_tokens`).
    """

    def __init__(
        self, choice: ResidentChoice, pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> None:
        super().__init__(choice, pool, capacity, like_keys, like_values)
        self._attended = torch.full_like(self._ids, NONE)

    def empty_slots(self) -> None:
        """See DeviceContext. Waits for what is read late, so that nothing arrives afterwards."""
        device = self._ids.device
        wait_for(LATE, device)
        stream_for(LATE, device).synchronize()
        super().empty_slots()

    def attended(
        self, call: AttentionCall, memory: LayerMemory[Any], pool: BlockPool, numbers: torch.Tensor,
        table: torch.Tensor, sent: SentToken, cpu: CpuTurn | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See DeviceContext."""
        assert cpu is not None
        assert self.choice.bus_share is not None
        vectors, ids, attended, *parts = memory.context
        ids, misses, into = self._placed(call, vectors, ids, numbers[:, CONTEXT], sent.missed)
        early, late = divided(ids, misses, into, sent.missed, self.choice.bus_share, attended, cpu.listed)
        cpu.send(call.q)
        self._fetch(pool, table, early, into, parts)
        places = memory.window, memory.initial, attended, Slots(*parts), numbers
        shares, logarithms = attend(call.q, call.k, call.v, *places, call.scale, call.softcap, (sent.key, sent.value))
        device = call.q.device
        stream = stream_for(LATE, device)
        stream.wait_stream(torch.cuda.current_stream(device))
        for each in (late, into):
            each.record_stream(stream)
        with torch.cuda.stream(stream):
            self._fetch(pool, table, late, into, parts)
        out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=device)
        join_parts(shares, logarithms, *cpu.attended(), out, lse)
        return out, lse

    @property
    def _slot_arrays(self) -> list[torch.Tensor]:
        return [self._ids, self._attended, *self._parts]

    def _set_slot_arrays(self, arrays: list[torch.Tensor]) -> None:
        ids, self._attended, *slots = arrays
        super()._set_slot_arrays([ids, *slots])
