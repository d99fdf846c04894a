"""Runs of tokens that a block of queries attends to, from vertical lines, diagonal bands and key blocks."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from hetero_kv.cpu_ops.threads import kernel_threads

QUERY_BLOCK = 64
"""Queries of a block, counted from the chunk's first; they share one list of keys."""


def runs_of_heads(
    lines: Sequence[np.ndarray], bands: Sequence[np.ndarray], key_blocks: Sequence[np.ndarray | None], past: int,
    n: int, sparse: int | None = None, threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Returns each head's runs of keys in a chunk of n tokens after `past` tokens, from lines, bands and key blocks.

    For each head: lines: [count, 2] int32, tokens [first, stop) that all later queries see, ascending, disjoint.
    bands: [count, 2] int32, distances [least, stop) at which a query sees keys, ascending, disjoint. key_blocks:
    [blocks, count] int32, further blocks of `QUERY_BLOCK` keys that each block of queries sees, counted from the first
    past token, ascending; negative for padding; None for no key blocks. A block of queries sees every token that any of
    its queries sees in a band, and its own tokens. sparse: how many blocks of queries leave keys out (None: all); later
    blocks see everything. threads: number of threads (None: Numba's setting).

    Returns runs [count, 2] int32 and starts [heads * blocks + 1] int64, the first run of each head and block.
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
    inputs = *(array for part in parts for array in part), first, past, n, sparse
    with kernel_threads(threads) as used:
        call_region("key runs", "", region, (*inputs, room, False, starts, room), used)
        # `starts` now has the number of runs of each block; their sum gives the offsets.
        np.cumsum(starts, out=starts)
        runs = np.empty((starts[-1], 2), np.int32)
        call_region("key runs", "", region, (*inputs, room, True, starts, runs), used)
    return runs, starts


def compile_kernels() -> None:
    """Compile the kernels, or load them from Numba's on-disk cache, before the first prompt needs them."""
    _runs_region()


def _in_one(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parts concatenated, int32, and the offset of each part and of the end, int64."""
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([part.size for part in parts], out=starts[1:])
    return np.concatenate([np.ascontiguousarray(part, np.int32) for part in parts]), starts


def ranges_of(numbers: np.ndarray, always: int) -> np.ndarray:
    """Returns the ascending ranges [first, stop) that cover `numbers` and all numbers below `always`: [count, 2] int32.

    numbers: at least 0 each, in any order.
    """
    return _ranges_of(np.ascontiguousarray(numbers, np.int64), always)


_INT2, _INT1 = types.Array(types.int32, 2, "C"), types.Array(types.int64, 1, "C")


@region_arguments("key runs")
def _arguments(_: str) -> tuple[Any, ...]:
    """(lines, line_starts, bands, band_starts, key_blocks, key_block_starts, first, past, n, sparse, room, packs,
    starts, runs).

    lines, bands and key_blocks of all heads are concatenated, with starts as from `_in_one`. first: the offset of each
    head's part of the buffer `room`, in runs. packs: False to write runs to `room`, and each block's number of runs to
    starts[1:]; True to copy them from `room` to `runs`, at the offsets in starts.
    """
    numbers, at = types.Array(types.int32, 1, "C"), types.int64
    lists = numbers, _INT1, numbers, _INT1, numbers, _INT1
    return *lists, _INT1, at, at, at, _INT2, types.boolean, _INT1, _INT2


@njit(types.boolean(_INT2, _INT1, types.int64, types.int64), cache=True, nogil=True)
def are_sound(runs, starts, past, n):
    """Whether runs ascend, contain only tokens that their block may see, and end with the block's own tokens."""
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
    # One more than the largest number, so that the last range ends.
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


@device_function
def _added(runs, begin, count, first, stop):
    """Add [first, stop) to the runs [begin, count), none of which begins later; returns the new `count`."""
    if stop <= first:
        return count
    if count > begin and first <= runs[count - 1, 1]:
        runs[count - 1, 1] = max(np.int64(runs[count - 1, 1]), stop)
        return count
    runs[count, 0], runs[count, 1] = first, stop
    return count + 1


@device_function
def _first_of(key_blocks, place):
    """Returns the first token of the key block at `place`; after the last block, a number above all tokens."""
    return np.int64(key_blocks[place]) * QUERY_BLOCK if place < key_blocks.size else np.int64(1) << 62


@device_function
def _block_runs(lines, bands, key_blocks, own, stop, runs, begin):
    """Write the runs of a block of queries, whose own tokens are [own, stop), from `begin` on; returns their end."""
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
