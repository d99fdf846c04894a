"""Restores a cache from a saved context: the state of its layers, its block tables, and its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.contexts.block_loading import BlockLoader
from hetero_kv.contexts.cache_pieces import SavedGroup, saved_groups
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.capacity import blocks_exhausted
from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.padding_mask import PaddingMask
from hetero_kv.engine.recurrent_state import StateBeside, StateShape
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.engine.sequence import Layout


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model's cache layers.

    Attributes:
        by_layer: layer index -> the shape of its keys and values.
        states: layer index -> the shape of a recurrent layer's state.
    """

    by_layer: Mapping[int, KVShape]
    dtype: torch.dtype
    device: torch.device
    states: Mapping[int, StateShape]

    def place(self, layer_idx: int, rows: int, parts: list[SavedPart], made: dict[int, object]) -> RestoreTarget:
        """The Place in which a layer of `rows` rows is restored."""
        shape = self.by_layer[layer_idx]
        keys, values = (
            torch.empty(rows, shape.kv_heads, 0, dim, dtype=self.dtype, device=self.device)
            for dim in (shape.k_dim, shape.v_dim)
        )
        state = self.states.get(layer_idx)
        return RestoreTarget(keys, values, parts, made, state.tensors if state else {})


def restore(
    cache: HeteroCache, context: OpenContext, shapes: Shapes, *, verify: bool, first: int | None = None
) -> None:
    """Load a context, whose identity is checked already, into an empty cache.

    Args:
        verify: whether to read and check all blocks; if not, a block is first read when it is attended to.
        first: how many of the first tokens are loaded, if layers can roll back to there; later blocks are left
            uninitialised, and the caller rolls back. None for all.

    Raises:
        DamagedContextError: the file does not fit these layers; or some blocks are damaged. Then the cache is loaded,
            and the error gives the number of intact tokens.
        CacheFullError: the context exceeds `max_seq_len`, or the free blocks of a store that caches share.
    """
    file = context.file
    saved, parts = saved_groups(context.metadata, list(file.entries), file.tensor, file.where)
    columns = _columns(context, saved)
    layers = len(cache.layers)
    if any(len(each.layers) != layers for each in saved):
        raise DamagedContextError(f"{file.where} lacks layers of the model, which has {layers}")
    groups = cache.begin_restored([(each.rows, each.length) for each in saved])
    ids = [_adopt(context, number, layout, groups, saved) for number, layout in enumerate(groups[0].layouts)]
    for group, each in zip(groups, saved, strict=True):
        _restore_group(group, each, parts, shapes, file.where)
    filling = BlockLoader(context, groups, verify=verify, first=first)
    for number, layout in enumerate(groups[0].layouts):
        filling.fill(number, layout, ids[number])
    cache.mapped_files = filling.mapped_files()
    for group, each in zip(groups, saved, strict=True):
        for layer, part in zip(group.layers, each.layers, strict=True):
            if isinstance(layer, FamilyLayer):
                layer.after_restore(part)
    cache.columns = columns
    if filling.damaged:
        raise min(filling.damaged, key=lambda error: error.whole)


def _columns(context: OpenContext, saved: list[SavedGroup]) -> PaddingMask:
    where = context.file.where
    own = SavedPart(numbers=context.metadata, where=where)
    lengths = [each.length for each in saved for _ in range(each.rows)]
    count = own.integer("columns", max(lengths))
    if "columns" not in context.file.entries:
        if any(length != count for length in lengths):
            raise own.wrong("rows have several lengths, and the padding is missing")
        return PaddingMask(count)
    own.put(columns=context.file.tensor("columns"))
    padding = own.tensor("columns", (len(lengths), count), torch.bool, torch.device("cpu"))
    if padding.sum(dim=1).tolist() != lengths:
        raise own.wrong("the rows' lengths contradict the padding")
    return PaddingMask(count, padding)


def _adopt(
    context: OpenContext, number: int, layout: Layout, groups: list[EqualLengthGroup], saved: list[SavedGroup]
) -> np.ndarray:
    """Set the sequences' block tables to the file's.

    Returns the ids of its blocks, [blocks] int32: the first of the pools, or any in a store that caches share.
    """
    try:
        return _adopted(context, number, layout, groups, saved)
    finally:
        # Blocks of no table are free again, also after an error.
        groups[0].store.allocators[layout].recount()


def _adopted(
    context: OpenContext, number: int, layout: Layout, groups: list[EqualLengthGroup], saved: list[SavedGroup]
) -> np.ndarray:
    file, path = context.file, f"layouts/{number}"
    block_size, lengths = context.layout(number)
    if block_size != layout.block_size or any(len(each.stored) <= number >= len(each.finalized) for each in saved):
        raise DamagedContextError(f"{file.where} lacks the blocks of these settings")
    allocator = groups[0].store.allocators[layout]
    if len(lengths) > allocator.num_blocks:
        raise DamagedContextError(f"{file.where} has more blocks than its rows can fill")
    if len(lengths) > allocator.free_blocks:
        raise blocks_exhausted(
            groups[0].store, layout, max(each.length for each in saved), allocator.free_blocks * block_size
        )
    ids = allocator.allocate(len(lengths))
    allocator.lengths[ids] = lengths
    used = np.zeros(len(lengths), bool)
    for index, (group, each) in enumerate(zip(groups, saved, strict=True)):
        stored, blocks = each.stored[number], -(-each.stored[number] // block_size)
        if each.finalized[number] > blocks:
            raise DamagedContextError(f"{file.where}: more blocks are finalized than exist")
        group.set_finalized(layout, each.finalized[number])
        for row, sequence in enumerate(group.sequences):
            name = f"{path}/tables/{index}/{row}"
            part = SavedPart({name: file.tensor(name)} if name in file.entries else {}, where=file.where)
            table = part.indices(name, (blocks,), torch.int32, len(lengths)).numpy()
            needed = np.full(blocks, block_size)
            needed[-1:] = stored - (blocks - 1) * block_size
            if np.any(lengths[table[:-1]] != block_size) or np.any(lengths[table[-1:]] < needed[-1:]):
                raise part.wrong(f"{name} names blocks that are not full")
            sequence.tables[layout].adopt(ids[table], stored)
            used[table] = True
    if not used.all():
        raise DamagedContextError(f"{file.where} has blocks of no row")
    return ids


def _restore_group(
    group: EqualLengthGroup, saved: SavedGroup, parts: list[SavedPart], shapes: Shapes, where: str
) -> None:
    group.shared = saved.shared
    for sequence in group.sequences:
        sequence.length, sequence.prompt_length = saved.length, saved.prompt_length
    made: dict[int, object] = {}
    for index, (layer, part) in enumerate(zip(group.layers, saved.layers, strict=True)):
        if type(layer).__name__ != saved.classes[index]:
            was = saved.classes[index][:80]
            raise DamagedContextError(f"{where}: layer {index} is {was}, not {type(layer).__name__}")
        layer_idx = layer.layer_idx if isinstance(layer, StateBeside) else index
        place = shapes.place(layer_idx, saved.rows, parts, made)
        if isinstance(layer, FamilyLayer):
            layer.restore(part, place)
            layer.is_initialized = True
        else:
            hf_cache_layers.restore(layer, part, place, saved.length)
