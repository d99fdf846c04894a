"""Loads the blocks of a saved context into a cache's pools: checked, and mapped where pages align, or copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from hetero_kv.contexts.block_runs import BLOCKS, BlockRun
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.tensor_file import TensorFile
from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.engine.mapped_file import MappedFile
from hetero_kv.engine.sequence import Layout
from hetero_kv.store.memory import will_need
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import SCORED, WRITTEN

# Threads that read and check blocks: few are enough for a disk, and for memory.
_READERS = 4


class BlockLoader:
    """Loads the blocks of files into blocks of pools.

    A cache's own store has these blocks to itself, and maps pages of the files. In a store that caches share, blocks
    change their owners, so they are copied.

    Args:
        groups: the groups whose block tables contain these blocks.
        verify: whether to read and check every block.
        first: how many of the first tokens need their blocks; None for all.

    Attributes:
        damaged: the first damage in each array.
    """

    def __init__(
        self, context: OpenContext, groups: Sequence[EqualLengthGroup], *, verify: bool, first: int | None = None
    ) -> None:
        self._context, self._groups, self._verify, self._first = context, groups, verify, first
        self.damaged: list[DamagedContextError] = []
        self._pools: dict[int, BlockPool] = {}
        self._mapped: dict[int, TensorFile] = {}

    def fill(self, number: int, layout: Layout, ids: np.ndarray) -> None:
        """Load the blocks of `layout`, which has this number in the file, into the pools' blocks `ids` [blocks] int32.

        Raises DamagedContextError if the file's runs or arrays do not fit these layers.
        """
        pools = self._groups[0].store.allocators[layout].pools
        arrays = {
            f"{BLOCKS}{number}/{layer_idx}/{name}": array
            for layer_idx, pool in pools.items()
            for name, array in pool.arrays.items()
            if array[0].numel()
        }
        start, count = 0, len(self._context.layout(number)[1])
        needed = count if self._first is None else min(count, -(-self._first // layout.block_size))
        for run in self._context.first_runs(number, self._first):
            file = self._context.holder(number, run)
            stop = start + run.count
            if stop > count:
                break
            _require_arrays(file, f"{BLOCKS}{number}/", arrays, run)
            if self._verify:
                self._check(file, arrays, run, ids[start:stop], layout)
            row = run.first
            for blocks in _consecutive(ids[start:stop]):
                mapped = {
                    name: array
                    for name, array in arrays.items()
                    if file.fill(name, row, array[blocks], maps=not self._groups[0].store.is_common)
                }
                self._note(file, mapped, pools, blocks)
                row += blocks.stop - blocks.start
            start = stop
        if start < needed:
            raise DamagedContextError(f"{self._context.file.where} lacks the positions of its {count} blocks")

    def mapped_files(self) -> tuple[MappedFile, ...]:
        """The files that are mapped into the pools; it also chains the layers' read-ahead."""
        in_order = [self._pools[layer_idx].read_ahead for layer_idx in sorted(self._pools)]
        for one, following in pairwise(in_order):
            assert one is not None
            one.following = following
        return tuple(file.watched() for file in self._mapped.values())

    def _check(
        self, file: TensorFile, arrays: Mapping[str, torch.Tensor], run: BlockRun, ids: np.ndarray, layout: Layout
    ) -> None:
        for name, damaged in _damaged(file, arrays, run).items():
            if damaged:
                first = min(_places(int(ids[block - run.first]), layout, self._groups) for block in damaged)
                tokens = f"tokens {first * layout.block_size} to {(first + 1) * layout.block_size - 1}"
                message = f"{file.where}: block {damaged[0]} of {name} is damaged, of {tokens}"
                self.damaged.append(DamagedContextError(message, first * layout.block_size))

    def _note(
        self, file: TensorFile, mapped: Mapping[str, torch.Tensor], pools: Mapping[int, BlockPool], blocks: slice
    ) -> None:
        """Mark mapped keys and values for reading on demand; prefetch the mapped arrays that score blocks."""
        for path, array in mapped.items():
            layer_idx, name = path.split("/")[2:]
            if name in WRITTEN:
                self._pools[int(layer_idx)] = pools[int(layer_idx)]
                pools[int(layer_idx)].is_in_file(blocks.start, blocks.stop)
            elif name in SCORED or name in pools[int(layer_idx)].auxiliary:
                will_need(array[blocks].data_ptr(), array[blocks].nbytes)
            self._mapped[id(file)] = file


def _consecutive(ids: np.ndarray) -> Iterator[slice]:
    """Ids of blocks, in their order, as runs of consecutive blocks."""
    ends = [*np.flatnonzero(np.diff(ids) != 1) + 1, len(ids)]
    for start, stop in pairwise([0, *ends]):
        if stop > start:
            yield slice(int(ids[start]), int(ids[stop - 1]) + 1)


def _damaged(file: TensorFile, names: Iterable[str], run: BlockRun) -> dict[str, list[int]]:
    """Array name -> the damaged blocks of a run."""
    listed = list(names)
    with ThreadPoolExecutor(_READERS) as readers:
        rows = readers.map(lambda name: file.damaged_rows(name, run.first, run.first + run.count), listed)
        return dict(zip(listed, rows, strict=True))


def _require_arrays(file: TensorFile, path: str, arrays: Mapping[str, torch.Tensor], run: BlockRun) -> None:
    """Raise DamagedContextError unless the file has the run with the layers' arrays, in their dtypes and shapes."""
    there = {name: entry for name, entry in file.entries.items() if name.startswith(path)}
    if there.keys() != arrays.keys():
        raise DamagedContextError(
            f"{file.where} lacks the blocks of these layers, or another version of hetero-kv saved it with other arrays"
        )
    for name, array in arrays.items():
        entry = there[name]
        fits = entry.dtype == array.dtype and entry.shape[1:] == array.shape[1:]
        if not fits or entry.shape[0] < run.first + run.count:
            raise DamagedContextError(
                f"{file.where}: {name} is {entry.dtype} {list(entry.shape)}, which is not its layer's"
            )


def _places(block: int, layout: Layout, groups: Sequence[EqualLengthGroup]) -> int:
    """The first index of a pool's block in any sequence's block table."""
    places = [np.flatnonzero(sequence.tables[layout].ids == block) for group in groups for sequence in group.sequences]
    return min(int(place[0]) for place in places if len(place))
