"""Which keys a block of queries attends to, as runs of tokens: made from lines and diagonals, or from blocks."""

from typing import Any

import numpy as np
from numba import njit, types

QUERY_BLOCK = 64
"""Queries that share a list of keys, from the chunk's first on."""


def line_runs(
    lines: np.ndarray, bands: np.ndarray, past: int, n: int, key_blocks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Runs of one head in a chunk of n tokens behind `past`, from vertical lines and diagonal bands.

    lines: [count, 2] int32, tokens [first, stop) that all later queries see, in order, without overlap. bands: [count,
    2] int32, distances [least, stop) at which a query sees keys, likewise. A block of queries sees every token that any
    of them sees in a band, and its own tokens. key_blocks: [blocks, count] int32, blocks of `QUERY_BLOCK` keys, counted
    from the first of all, that each block of queries sees besides, ascending; below 0 for none.

    Returns runs [count, 2] int32 and starts [blocks + 1] int64, where those of each block begin.
    """
    if key_blocks is None:
        key_blocks = np.empty((-(-n // QUERY_BLOCK), 0), np.int32)
    return _line_runs(*(np.ascontiguousarray(each, np.int32) for each in (lines, bands, key_blocks)), past, n)


def block_runs(chosen: np.ndarray, past: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs of one head in a chunk of n tokens behind `past` from chosen blocks of keys.

    chosen: [blocks, key_blocks] bool; key blocks have `QUERY_BLOCK` tokens, counted from the first of all. A block of
    queries sees its own tokens besides, and of chosen blocks those before its last query.

    Returns as `line_runs`.
    """
    return _block_runs(np.ascontiguousarray(chosen, np.bool_), past, n)


def ranges_of(numbers: np.ndarray, always: int) -> np.ndarray:
    """Ascending ranges [count, 2] int32, [first, stop), of numbers, 0 or more in any order, and all below `always`."""
    return _ranges_of(np.ascontiguousarray(numbers, np.int64), always)


_INT2, _INT1 = types.Array(types.int32, 2, "C"), types.Array(types.int64, 1, "C")
_RESULT = types.Tuple((_INT2, _INT1))


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


@njit(types.int64(_INT2, types.int64, types.int64, types.int64, types.int64), cache=True, nogil=True)
def _added(runs, begin, count, first, stop):
    """Add [first, stop) to the runs [begin, count), none of which begins later; returns their new end."""
    if stop <= first:
        return count
    if count > begin and first <= runs[count - 1, 1]:
        runs[count - 1, 1] = max(np.int64(runs[count - 1, 1]), stop)
        return count
    runs[count, 0], runs[count, 1] = first, stop
    return count + 1


@njit(types.int64(_INT1, types.int64), cache=True, nogil=True)
def _first_of(key_blocks, place):
    """The first token of the key block at `place`, beyond all tokens behind the last."""
    return key_blocks[place] * QUERY_BLOCK if place < key_blocks.size else np.int64(1) << 62


@njit(_RESULT(_INT2, _INT2, _INT2, types.int64, types.int64), cache=True, nogil=True)
def _line_runs(lines, bands, key_blocks, past, n):
    blocks = -(-n // QUERY_BLOCK)
    starts = np.zeros(blocks + 1, np.int64)
    most = lines.shape[0] + bands.shape[0] + key_blocks.shape[1] + 1
    runs = np.empty((blocks * most, 2), np.int32)
    count, besides = np.int64(0), np.empty(key_blocks.shape[1], np.int64)
    for block in range(blocks):
        own = past + block * QUERY_BLOCK
        stop = min(own + QUERY_BLOCK, past + n)
        begin, line, place = count, 0, 0
        for each in range(besides.size):
            besides[each] = key_blocks[block, each]
            place += besides[each] < 0
        # The farthest band comes first.
        for band in range(bands.shape[0] - 1, -2, -1):
            first, end = own, stop
            if band >= 0:
                first, end = max(np.int64(0), own - bands[band, 1] + 1), stop - bands[band, 0]
            while line < lines.shape[0] and lines[line, 0] <= first:
                while _first_of(besides, place) <= lines[line, 0]:
                    at = _first_of(besides, place)
                    count = _added(runs, begin, count, at, min(at + QUERY_BLOCK, stop))
                    place += 1
                count = _added(runs, begin, count, np.int64(lines[line, 0]), min(np.int64(lines[line, 1]), stop))
                line += 1
            while _first_of(besides, place) <= first:
                at = _first_of(besides, place)
                count = _added(runs, begin, count, at, min(at + QUERY_BLOCK, stop))
                place += 1
            count = _added(runs, begin, count, first, end)
        starts[block + 1] = count
    return runs[:count].copy(), starts


@njit(_RESULT(types.Array(types.boolean, 2, "C"), types.int64, types.int64), cache=True, nogil=True)
def _block_runs(chosen, past, n):
    blocks, key_blocks = chosen.shape
    starts = np.zeros(blocks + 1, np.int64)
    runs = np.empty((blocks * (key_blocks // 2 + 2), 2), np.int32)
    count = np.int64(0)
    for block in range(blocks):
        own = past + block * QUERY_BLOCK
        stop = min(own + QUERY_BLOCK, past + n)
        begin = count
        for key_block in range(min(key_blocks, -(-own // QUERY_BLOCK))):
            if chosen[block, key_block]:
                first = np.int64(key_block * QUERY_BLOCK)
                count = _added(runs, begin, count, first, min(first + QUERY_BLOCK, stop))
        count = _added(runs, begin, count, own, stop)
        starts[block + 1] = count
    return runs[:count].copy(), starts
