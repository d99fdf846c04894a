"""What layers share of the tokens that they decode on a GPU: where a token is, and what goes to DRAM behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from hetero_kv.engine.deferred_readback import HostCopy
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.retrieval.device_context import SentToken
from hetero_kv.families.retrieval.read_bytes import ReadSizes
from hetero_kv.families.retrieval.resident_layer import ResidentLayer
from hetero_kv.gpu_ops.resident_attention import NUMBERS

#: Parts of a `SentToken` that are int32.
_WHOLE = frozenset(("missed", "taken"))


class DeviceTokens:
    """Memory of one group's layers with one layout.

    The keys and values of a token come to the CPU in one copy, after all layers, and are in the pools before the next
    token: the host waits once for a token.

    Args:
        layers: the layers that attend on the GPU.
        capacity: the most blocks of a sequence.
        device: the GPU.

    Attributes:
        numbers: see `gpu_ops.resident_attention`.
        table: [rows, capacity] int32, the Context's blocks in the pools.
    """

    def __init__(self, layers: Sequence[ResidentLayer], capacity: int, device: torch.device) -> None:
        rows = len(layers[0].group.sequences)
        self.numbers = torch.zeros(NUMBERS, dtype=torch.int64, device=device)
        self.table = torch.zeros(rows, capacity, dtype=torch.int32, device=device)
        self._layers, self._table = list(layers), np.empty((0, 0), np.int32)
        self._shapes = [_shapes(layer, rows) for layer in layers]
        size = sum(math.prod(shape) for shapes in self._shapes for shape in shapes.values())
        # Zeros, because a layer without slots counts no blocks.
        self._sent = torch.zeros(size, dtype=torch.float32, device=device)
        sent = zip(self._layers, self._split(self._sent), strict=True)
        self._by_layer = {layer.layer_idx: parts for layer, parts in sent}

    @classmethod
    def of(cls, layer: ResidentLayer, step: Step, device: torch.device) -> DeviceTokens:
        """Those of the layer's group and layout."""
        group, layout = step.group, layer.layout
        found: DeviceTokens | None = group.device_tokens.get(layout)
        if found is None:
            sharing = [
                other
                for other in group.layers
                if isinstance(other, ResidentLayer) and other.layout is layout and other.resident is not None
            ]
            capacity = -(-group.store.capacity // layout.block_size)
            found = group.device_tokens[layout] = cls(sharing, capacity, device)
        return found

    def sent_by(self, layer: ResidentLayer) -> SentToken:
        """Where the layer writes what goes to the CPU."""
        return self._by_layer[layer.layer_idx]

    def begin(self, step: Step, blocks: StepBlocks) -> None:
        """Tell the device of a step's token, once for all layers; its keys and values are stored with the step."""
        key = "device tokens", id(self)
        if key in step.computed:
            return
        step.computed[key] = True
        layout = self._layers[0].layout
        context = np.ascontiguousarray(self._layers[0].context_of(blocks.table, step.length))
        numbers = torch.tensor([step.past, blocks.finalized * layout.block_size, context.shape[1]])
        # From memory of its own, because the copy before may not have arrived where a forward has failed.
        self.numbers.copy_(numbers.pin_memory(), non_blocking=True)
        if not np.array_equal(context, self._table):
            # Of the whole width, so that it is one copy and no launch.
            table = np.pad(context, ((0, 0), (0, self.table.shape[1] - context.shape[1])))
            self.table.copy_(torch.from_numpy(table).pin_memory(), non_blocking=True)
            # Only now: an interrupted copy is made again.
            self._table = context
        step.host_copies.append(HostCopy(self._sent, lambda sent: self._store(step, sent)))

    def _store(self, step: Step, sent: torch.Tensor) -> None:
        """Store what all layers have sent in their pools."""
        for layer, parts in zip(self._layers, self._split(sent), strict=True):
            layer.store_token(step, parts.key, parts.value)
            self._count(layer, step, parts)
            if parts.query is not None and parts.lse is not None:
                # The next token overwrites the copies.
                observed = (part.clone().numpy() for part in (parts.query, parts.lse))
                layer.remember(step.past, layer.scale, layer.softcap, *observed)

    def _count(self, layer: ResidentLayer, step: Step, sent: SentToken) -> None:
        pool, resident, rows = layer.pool, layer.resident, len(step.group.sequences)
        assert pool is not None
        assert resident is not None
        if layer.reading is None:
            layer.reading = ReadSizes.of(pool, layer.window)
        layer.count_step(resident.counts(step.length, layer.layout.context_blocks(step.length), rows, sent))
        layer.from_dram = layer.from_dram.plus(int(sent.missed.sum()) * resident.missed_bytes(pool) / rows)

    def _split(self, numbers: torch.Tensor) -> list[SentToken]:
        """The layers' parts of `_sent`, or of its copy."""
        found, start = [], 0
        for shapes in self._shapes:
            parts = {}
            for name, shape in shapes.items():
                size = math.prod(shape)
                part = numbers[start : start + size].view(shape)
                # Whole numbers in the places of float32.
                parts[name] = part.view(torch.int32) if name in _WHOLE else part
                start += size
            found.append(SentToken(**parts))
        return found


def _shapes(layer: ResidentLayer, rows: int) -> dict[str, tuple[int, ...]]:
    """What a layer sends, by the names of `SentToken`."""
    window, resident = layer.window, layer.resident
    assert window is not None
    assert resident is not None
    kv_heads, dims = window.keys.shape[1], (window.keys.shape[3], window.values.shape[3])
    of_token = {name: (rows, kv_heads, 1, dim) for name, dim in zip(("key", "value"), dims, strict=True)}
    return {**of_token, "missed": (rows * kv_heads,), **resident.sent_shapes(rows)}
