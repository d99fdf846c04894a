"""Which keys a block of queries attends to, as runs of tokens: made from lines and diagonals, or from blocks."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.inner import inner
from cpu_ops.kernel_address import address_of
from cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from cpu_ops.threads import kernel_threads

QUERY_BLOCK = 64
"""Queries that share a list of keys, from the chunk's first on."""


def runs_of_heads(
    lines: Sequence[np.ndarray], bands: Sequence[np.ndarray], key_blocks: Sequence[np.ndarray | None], past: int,
    n: int, sparse: int | None = None, threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Runs of heads in a chunk of n tokens behind `past`, from vertical lines, diagonal bands and blocks.

    For each head: lines: [count, 2] int32, tokens [first, stop) that all later queries see, in order, without overlap.
    bands: [count, 2] int32, distances [least, stop) at which a query sees keys, likewise. key_blocks: [blocks, count]
    int32, blocks of `QUERY_BLOCK` keys, counted from the first of all, that each block of queries sees besides,
    ascending; below 0 for none; None: none at all. A block of queries sees every token that any of them sees in a band,
    and its own tokens. sparse: how many blocks of queries leave keys out (None: all); those behind see everything.
    threads: how many to use (None: Numba's setting).

    Returns runs [count, 2] int32 and starts [heads * blocks + 1] int64, where those of each head and block begin.
    """
    blocks, heads = -(-n // QUERY_BLOCK), len(lines)
    besides = [np.empty((blocks, 0), np.int32) if each is None else each for each in key_blocks]
    if any(each.shape[0] != blocks for each in besides):
        raise ValueError(f"blocks of keys {[each.shape for each in besides]} are not those of {blocks} of queries")
    parts = [_in_one([np.reshape(each, -1) for each in of]) for of in (lines, bands, besides)]
    most = [len(line) + len(band) + each.shape[1] + 1 for line, band, each in zip(lines, bands, besides, strict=True)]
    room = np.empty((blocks * sum(most), 2), np.int32)
    first = np.concatenate([[0], np.cumsum(most, dtype=np.int64)]) * blocks
    starts, region = np.zeros(heads * blocks + 1, np.int64), _runs_region()
    sparse = blocks if sparse is None else sparse
    given = *(array for part in parts for array in part), first, past, n, sparse
    with kernel_threads(threads) as used:
        call_region("key runs", "", region, (*given, room, False, starts, room), used)
        # A head's are counted from its first; where the heads begin is known by now.
        np.cumsum(starts, out=starts)
        runs = np.empty((starts[-1], 2), np.int32)
        call_region("key runs", "", region, (*given, room, True, starts, runs), used)
    return runs, starts


def compile_kernels() -> None:
    """Compile the kernels, or load them from Numba's on-disk cache, before the first prompt needs them."""
    _runs_region()


def _in_one(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers one after the other, int32, and where each part begins, int64, with the end."""
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([part.size for part in parts], out=starts[1:])
    return np.concatenate([np.ascontiguousarray(part, np.int32) for part in parts]), starts


def ranges_of(numbers: np.ndarray, always: int) -> np.ndarray:
    """Ascending ranges [count, 2] int32, [first, stop), of numbers, 0 or more in any order, and all below `always`."""
    return _ranges_of(np.ascontiguousarray(numbers, np.int64), always)


_INT2, _INT1 = types.Array(types.int32, 2, "C"), types.Array(types.int64, 1, "C")


@region_arguments("key runs")
def _arguments(_: str) -> tuple[Any, ...]:
    """(lines, their starts, bands, their starts, key blocks, their starts, first, past, n, sparse, room, packs, starts,
    runs).

    Numbers of all heads one after the other, as `_in_one` has them. first: where each head's room begins, in runs.
    packs: whether a head's runs are to go from its room to their place in `runs`, by starts, which are the whole's
    then; else room is filled, and starts[1:] are how many runs a block has.
    """
    numbers, at = types.Array(types.int32, 1, "C"), types.int64
    lists = numbers, _INT1, numbers, _INT1, numbers, _INT1
    return *lists, _INT1, at, at, at, _INT2, types.boolean, _INT1, _INT2


@njit(types.boolean(_INT2, _INT1, types.int64, types.int64), cache=True, nogil=True)
def are_sound(runs, starts, past, n):
    """Whether runs lie in order, within what their block sees, and end with the block's own tokens."""
    blocks = -(-n // QUERY_BLOCK)
    if starts[0] != 0 or starts[starts.size - 1] != runs.shape[0]:
        return False
    for item in range(starts.size - 1):
        if starts[item + 1] <= starts[item] or starts[item + 1] > runs.shape[0]:
            return False
        own = past + item % blocks * QUERY_BLOCK
        stop = min(own + QUERY_BLOCK, past + n)
        behind = np.int64(0)
        for run in range(starts[item], starts[item + 1]):
            if runs[run, 0] < behind or runs[run, 1] <= runs[run, 0]:
                return False
            behind = np.int64(runs[run, 1])
        if behind != stop or runs[starts[item + 1] - 1, 0] > own:
            return False
    return True


@njit(_INT2(_INT1, types.int64), cache=True, nogil=True)
def _ranges_of(numbers, always):
    stop: Any = always
    for number in numbers:
        stop = max(stop, number + 1)
    # One more than there is, so that the last range ends.
    named = np.zeros(stop + 1, np.bool_)
    named[:always] = True
    for number in numbers:
        named[number] = True
    ranges = np.empty((numbers.size + 1, 2), np.int32)
    count, first = 0, -1
    for number in range(stop + 1):
        if named[number]:
            first = number if first < 0 else first
        elif first >= 0:
            ranges[count, 0], ranges[count, 1] = first, number
            count, first = count + 1, -1
    return ranges[:count].copy()


@inner
def _added(runs, begin, count, first, stop):
    """Add [first, stop) to the runs [begin, count), none of which begins later; returns their new end."""
    if stop <= first:
        return count
    if count > begin and first <= runs[count - 1, 1]:
        runs[count - 1, 1] = max(np.int64(runs[count - 1, 1]), stop)
        return count
    runs[count, 0], runs[count, 1] = first, stop
    return count + 1


@inner
def _first_of(key_blocks, place):
    """The first token of the key block at `place`, beyond all tokens behind the last."""
    return np.int64(key_blocks[place]) * QUERY_BLOCK if place < key_blocks.size else np.int64(1) << 62


@inner
def _block_runs(lines, bands, key_blocks, own, stop, runs, begin):
    """Write the runs of one block of queries, whose own tokens are [own, stop), from `begin` on; returns their end."""
    count, line, place = begin, 0, 0
    while place < key_blocks.size and key_blocks[place] < 0:
        place += 1
    # The farthest band comes first.
    for band in range(bands.size // 2 - 1, -2, -1):
        first, end = own, stop
        if band >= 0:
            first, end = max(np.int64(0), own - bands[2 * band + 1] + 1), stop - bands[2 * band]
        while line < lines.size and lines[line] <= first:
            while _first_of(key_blocks, place) <= lines[line]:
                at = _first_of(key_blocks, place)
                count = _added(runs, begin, count, at, min(at + QUERY_BLOCK, stop))
                place += 1
            count = _added(runs, begin, count, np.int64(lines[line]), min(np.int64(lines[line + 1]), stop))
            line += 2
        while _first_of(key_blocks, place) <= first:
            at = _first_of(key_blocks, place)
            count = _added(runs, begin, count, at, min(at + QUERY_BLOCK, stop))
            place += 1
        count = _added(runs, begin, count, first, end)
    return count


@cache
def _runs_region() -> int:
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True)
    def list_runs(thread, threads, arguments):
        (
            lines, line_starts, bands, band_starts, key_blocks, key_block_starts, first, past, n, sparse, room, packs,
            starts, runs,
        ) = arguments_at("key runs", "", arguments)  # fmt: skip
        blocks = -(-n // QUERY_BLOCK)
        for head in range(thread, first.size - 1, threads):
            if packs:
                begin, end = starts[head * blocks], starts[(head + 1) * blocks]
                for run in range(end - begin):
                    runs[begin + run, 0], runs[begin + run, 1] = room[first[head] + run, 0], room[first[head] + run, 1]
                continue
            own_lines = lines[line_starts[head] : line_starts[head + 1]]
            own_bands = bands[band_starts[head] : band_starts[head + 1]]
            besides = key_blocks[key_block_starts[head] : key_block_starts[head + 1]]
            each, begin = besides.size // blocks, first[head]
            for block in range(blocks):
                own = past + block * QUERY_BLOCK
                stop = min(own + QUERY_BLOCK, past + n)
                if block < sparse:
                    seen = besides[block * each : (block + 1) * each]
                    end = _block_runs(own_lines, own_bands, seen, own, stop, room, begin)
                else:
                    end = _added(room, begin, begin, np.int64(0), stop)
                starts[head * blocks + block + 1] = end - begin
                begin = end
        return np.int64(0 * code_version)

    return address_of(list_runs)
