"""What layers share of the tokens that they decode on a GPU: where each row lies, and what goes to DRAM behind it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hetero_kv.engine.deferred_readback import HostCopy
from hetero_kv.engine.row_buckets import bucket_of
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.device_context import LayerMemory, SentToken
from hetero_kv.families.retrieval.resident_layer import ResidentLayer
from hetero_kv.families.retrieval.split_context import LATE
from hetero_kv.gpu_ops.resident_attention import NUMBERS
from hetero_kv.gpu_ops.row_memory import RowMemory, addresses_of
from hetero_kv.gpu_ops.side_stream import wait_for

#: Parts of a `SentToken` that are int32.
_WHOLE = frozenset(("missed", "taken", "beyond"))


class DeviceTokens:
    """Memory of a store's layers with one layout, for the decoded tokens of a bucket of rows.

    The rows' own memory lies with their groups. A table on the GPU has its addresses, so that captured kernels serve
    whatever rows a forward has: the host writes the table anew where they are others.

    The keys and values of a token come to the CPU in one copy, after all layers, and are in the pools before the next
    token: the host waits once for a token.

    Args:
        layers: those of one group that attend on the GPU.
        rows: the most rows; a power of two.
        device: the GPU.

    Attributes:
        scaled: by layer index, scale and soft-capping of queries that go to the CPU.
    """

    def __init__(self, layers: Sequence[ResidentLayer], rows: int, device: torch.device) -> None:
        first = layers[0]
        capacity = -(-first.group.store.capacity // first.layout.block_size)
        self._rows, self._indices = rows, [layer.layer_idx for layer in layers]
        # See `gpu_ops.resident_attention`; and of each row the Context's blocks in the pools.
        self._numbers = torch.zeros(rows, NUMBERS, dtype=torch.int64, device=device)
        self._table = torch.zeros(rows, capacity, dtype=torch.int32, device=device)
        self._sent_tables: list[np.ndarray] = [np.empty(0, np.int32)] * rows
        # Of each group its layers' memory and its rows.
        self._members: list[tuple[tuple[int, ...], int]] = []
        self._forms = [_forms(layer) for layer in layers]
        counts = [len(forms) for forms in self._forms]
        self._addresses = torch.zeros(sum(counts), rows, dtype=torch.int64, device=device)
        tables = self._addresses.split(counts)
        self._memory = {each.layer_idx: _memory(each, table) for each, table in zip(layers, tables, strict=True)}
        self._shapes = [_shapes(layer, rows) for layer in layers]
        size = sum(math.prod(shape) for shapes in self._shapes for shape in shapes.values())
        # Zeros, because a layer without slots counts no blocks.
        self._sent = torch.zeros(size, dtype=torch.float32, device=device)
        self._parts = dict(zip(self._indices, self._split(self._sent), strict=True))
        self.scaled: dict[int, tuple[float, float | None]] = {}
        #: Has what is read behind the attention arrive before a forward ends; None where nothing is.
        self._before = partial(wait_for, LATE, device) if any(layer.needs_cpu for layer in layers) else None

    @classmethod
    def of(cls, layer: ResidentLayer, steps: Sequence[Step], device: torch.device, number: int = 0) -> DeviceTokens:
        """Those of the layer's layout for the rows of these steps, whose sequences are in one store.

        number: of these steps among those of a forward that are attended to by themselves.
        """
        group, layout = layer.group, layer.layout
        rows = bucket_of(sum(len(step.group.sequences) for step in steps))
        key = "device tokens", layout, rows, number
        found: DeviceTokens | None = group.store.device_tokens.get(key)
        if found is None:
            found = cls(_sharing(group.layers, layer), rows, device)
            group.store.device_tokens[key] = found
        return found

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(each.nbytes for each in (self._numbers, self._table, self._addresses, self._sent))

    def of_layer(
        self, layer: ResidentLayer, rows: int
    ) -> tuple[LayerMemory[RowMemory], torch.Tensor, torch.Tensor, SentToken]:
        """The arguments of `DeviceContext.attended` for the first rows: memory, numbers, table, and what is sent."""
        (keys, values), initial, context = self._memory[layer.layer_idx]
        window, own = (keys.first(rows), values.first(rows)), [each.first(rows) for each in context]
        sent = self._parts[layer.layer_idx].of_rows(slice(0, rows), self._rows)
        return LayerMemory(window, initial, own), self._numbers[:rows], self._table[:rows], sent

    def begin(self, steps: Sequence[Step]) -> None:
        """Tell the device of the steps' tokens, once for all layers; their keys and values are stored with the steps.

        Raises HeteroKVError where a value cannot be stored, when the forward ends, and as `_lying`.
        """
        key = "device tokens", id(self)
        if key in steps[0].computed:
            return
        steps[0].computed[key] = True
        numbers, members = np.zeros((self._rows, NUMBERS), np.int64), []
        tables: list[np.ndarray] = []
        for step in steps:
            layer, rows = self._layers_of(step)[0], len(step.group.sequences)
            blocks = step.blocks(layer.layout)
            context = layer.context_of(blocks.table, step.length)
            place = slice(len(tables), len(tables) + rows)
            numbers[place] = step.past, blocks.finalized * layer.layout.block_size, context.shape[1]
            tables += list(context)
            members.append((tuple(each.memory_number for each in self._layers_of(step)), rows))
        # From memory of their own, because the copies before may not have arrived where a forward has failed.
        self._numbers.copy_(torch.from_numpy(numbers).pin_memory(), non_blocking=True)
        if members != self._members:
            self._members = []
            self._addresses.copy_(self._lying(steps).pin_memory(), non_blocking=True)
            # Only now: an interrupted copy is made again.
            self._members = members
        self._send_tables(tables)
        steps[0].host_copies.append(HostCopy(self._sent, lambda sent: self._store(steps, sent), self._before))

    def _layers_of(self, step: Step) -> list[ResidentLayer]:
        return [step.group.layers[index] for index in self._indices]

    def _lying(self, steps: Sequence[Step]) -> torch.Tensor:
        """The addresses of the steps' rows, [arrays, rows] int64; 0 for rows of the bucket that are not in use.

        Raises HeteroKVError for rows that the captured kernels would misread.
        """
        for step in steps:
            for layer, forms in zip(self._layers_of(step), self._forms, strict=True):
                if layer.resident is None or _forms(layer) != forms:
                    raise HeteroKVError(
                        f"layer {layer.layer_idx}: sequences of one store that decode together have their memory on "
                        "the GPU in different shapes or dtypes; use a cache of its own for each kind"
                    )
        of_groups = [
            [addresses_of(array) for layer in self._layers_of(step) for array in _arrays(layer)] for step in steps
        ]
        found = np.zeros(self._addresses.shape, np.int64)
        for number, parts in enumerate(zip(*of_groups, strict=True)):
            own = list(itertools.chain(*parts))
            found[number, : len(own)] = own
        return torch.from_numpy(found)

    def _send_tables(self, tables: list[np.ndarray]) -> None:
        """Send the blocks of rows whose Context has other ones than at the last token."""
        changed = [row for row, table in enumerate(tables) if not np.array_equal(table, self._sent_tables[row])]
        if not changed:
            return
        first, end = changed[0], changed[-1] + 1
        # Of the whole width, so that it is one copy and no launch.
        whole = np.zeros((end - first, self._table.shape[1]), np.int32)
        for row, table in zip(whole, tables[first:end], strict=True):
            row[: len(table)] = table
        self._table[first:end].copy_(torch.from_numpy(whole).pin_memory(), non_blocking=True)
        # Only now: an interrupted copy is made again. A table grows in place, so its content is kept.
        self._sent_tables[first:end] = [table.copy() for table in tables[first:end]]

    def _store(self, steps: Sequence[Step], sent: torch.Tensor) -> None:
        """Store what all layers have sent in their pools."""
        for index, parts in zip(self._indices, self._split(sent), strict=True):
            row = 0
            for step in steps:
                rows = len(step.group.sequences)
                own, layer = parts.of_rows(slice(row, row + rows), self._rows), step.group.layers[index]
                row += rows
                layer.store_token(step, own.key, own.value)
                layer.count_token(step, own)
                if own.query is not None and own.lse is not None:
                    # The next token overwrites the copies.
                    observed = (part.clone().numpy() for part in (own.query, own.lse))
                    layer.remember(step.past, *self.scaled[index], *observed)

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


def _sharing(layers: Sequence[object], layer: ResidentLayer) -> list[ResidentLayer]:
    """The layers of a group that have the layout of one of them."""
    return [
        other
        for other in layers
        if isinstance(other, ResidentLayer) and other.layout is layer.layout and other.resident is not None
    ]


def _arrays(layer: ResidentLayer) -> list[torch.Tensor]:
    """What the layer's kernels read and write, [batch, ...] each: its window, then its Context."""
    window, resident = layer.window, layer.resident
    assert window is not None
    assert resident is not None
    return [window.keys, window.values, *resident.arrays]


def _forms(layer: ResidentLayer) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    """How a row of each of these arrays lies."""
    return [(array.shape[1:], array.stride()[1:], array.dtype) for array in _arrays(layer)]


def _memory(layer: ResidentLayer, table: torch.Tensor) -> LayerMemory[RowMemory]:
    """The memory of rows like the layer's whose addresses are in a table [arrays, rows]."""
    keys, values, *context = (RowMemory.like(*each) for each in zip(_arrays(layer), table, strict=True))
    assert layer.window is not None
    return LayerMemory((keys, values), layer.window.initial, context)


def _shapes(layer: ResidentLayer, rows: int) -> dict[str, tuple[int, ...]]:
    """What a layer sends, by the names of `SentToken`."""
    window, resident = layer.window, layer.resident
    assert window is not None
    assert resident is not None
    kv_heads, dims = window.keys.shape[1], (window.keys.shape[3], window.values.shape[3])
    of_token = {name: (rows, kv_heads, 1, dim) for name, dim in zip(("key", "value"), dims, strict=True)}
    return {**of_token, "missed": (rows * kv_heads,), **resident.sent_shapes(rows)}
