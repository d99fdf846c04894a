"""Attention masses of blocks from 4-bit coarse copies of their keys (`cpu_ops.key_codes`).

A score costs a fraction of a float32 score, and consecutive blocks are read at memory bandwidth, so that every block
can be scored. The kernel also computes the scores of the mean keys, which weight the mean values of unattended blocks
(`weights` in `block_rerank.arguments`).
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from hetero_kv.cpu_ops import block_rerank  # noqa: F401 (declares the arguments of "candidates")
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.exponential import LN_2, LOG2_E, row_softcap, tanh
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.key_codes import (
    CHANNELS,
    TOKENS,
    ZERO,
    bytes_of_block,
    code_scores,
    copy_natural,
    mean_scores_of,
    row_masses,
)
from hetero_kv.cpu_ops.parallel_region import REGION, arguments_at
from hetero_kv.cpu_ops.scratch import scratch
from hetero_kv.cpu_ops.simd import prefetch
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, numbers_of, storage_of
from hetero_kv.cpu_ops.tiles import tiles_for
from hetero_kv.cpu_ops.weight_dots import dot_instruction

_AHEAD = 4
"""How many blocks ahead the kernel prefetches those of a list."""
_CHUNK = 16
"""How many blocks are scored for all lists before the next ones, which are prefetched meanwhile."""
_MOST_AT_ONCE = 2
"""Blocks that are scored together, with queries read once; more would exceed the registers."""


def region_for(
    q: tuple[int, ...], codes: tuple[int, ...], means: tuple[int, ...], block_size: int, mean_dtype: np.dtype
) -> int:
    """Returns the address of a region with `block_rerank.arguments` for arrays of these shapes.

    codes: [num_blocks, kv_heads, 1, bytes_of_block]. Raises ValueError for shapes that do not fit together.
    """
    kind = storage_of(mean_dtype)
    if {codes[1], means[1]} != {q[1]} or means[3] * kind.group != q[3]:
        raise ValueError(f"codes {codes} and means {means} do not fit q {q}: kv_heads and k_dim must be equal")
    if block_size % TOKENS or codes[2:] != (1, bytes_of_block(block_size, q[3])):
        raise ValueError(f"codes {codes} do not fit blocks of {block_size} tokens of {q[3]} channels")
    return address_of(_region(isa(), dot_instruction(), kind.name, q[2], q[3], block_size))


@device_function(error_model="numpy")
def _quantize(queries, factor, numbers, factors, zeros):
    """Quantize queries [group, k_dim] to int8 numbers [group, padded channels].

    Writes factors [group], which scale the integer products, and zeros [group], their initial values, which correct for
    the code `ZERO` of 0.
    """
    for g in range(queries.shape[0]):
        largest = np.float32(0)
        for d in range(queries.shape[1]):
            largest = max(largest, abs(queries[g, d]))
        inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
        total = np.int32(0)
        for d in range(queries.shape[1]):
            number = np.int8(np.rint(queries[g, d] * inverse))
            numbers[g, d] = number
            total += np.int32(number)
        factors[g], zeros[g] = factor * largest / np.float32(127), -np.int32(ZERO) * total


def _at_once(lanes: int, queries: int) -> int:
    """Returns how many blocks are scored together, so that one number per block and query of a tile fills a vector."""
    return min(_MOST_AT_ONCE, max(1, lanes // queries))


@cache
def _region(instructions: str, how: str, kind: str, group: int, k_dim: int, block_size: int) -> Any:
    tiles, steps = tiles_for(instructions, group, block_size), -(-k_dim // CHANNELS)
    lanes, tile_queries, num_tiles = tiles.lanes, tiles.queries, tiles.number
    at_once = _at_once(lanes, tile_queries)
    rows = at_once * tile_queries
    mean_units, code_bytes = STORAGE_TYPES[kind].units(k_dim), bytes_of_block(block_size, k_dim)
    numbers = numbers_of(STORAGE_TYPES["q8_0"], STORAGE_TYPES[kind])
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def score(thread, threads, arguments):
        q, codes, means, table, positions, scale, softcap, weights, masses, token_scores = arguments_at(
            "candidates", numbers, arguments
        )
        kv_heads, lists = q.shape[1], positions.shape[1]
        scores_all, size = positions.shape[2] == 0, np.log(np.float32(block_size))
        places = table.shape[1] if scores_all else positions.shape[2]
        factor = np.float32(scale / softcap) if softcap > 0 else np.float32(scale * LOG2_E)
        list_count, scores = q.shape[0] * kv_heads, scratch(rows, block_size)
        scaled = scratch(list_count * group, k_dim)
        quantized = np.zeros((list_count * group, steps * CHANNELS), np.int8)
        words = quantized.view(np.int32)
        factors, zeros = np.empty(list_count * group, np.float32), np.empty(list_count * group, np.int32)
        for index in range(list_count):
            its_q, at = q[index // kv_heads, index % kv_heads], index * group
            for g in range(group):
                for d in range(k_dim):
                    scaled[at + g, d] = its_q[g, d] * factor
            _quantize(its_q, factor, quantized[at : at + group], factors[at : at + group], zeros[at : at + group])
        mean_scores, block_masses, no_shifts = (
            scratch(num_tiles, 2 * lanes),
            scratch(num_tiles, 2 * lanes),
            np.zeros((num_tiles, 2 * lanes), np.float32),
        )
        # Codes hold keys less their block's mean key, whose score is added to each token's score where these are read,
        # else to the mass alone: sums of powers of differences need no maximum.
        shifts_scores = softcap > 0 or token_scores.shape[3] > 0
        code_shifts, mass_shifts = (mean_scores, no_shifts) if shifts_scores else (no_shifts, mean_scores)
        num_candidates, batch = _number_of(positions, list_count, kv_heads, places), np.zeros(at_once, np.int64)
        mean_offsets, code_offsets, batch_places, next_codes = (
            np.empty(at_once, np.int64),
            np.empty(at_once, np.int64),
            np.zeros(at_once, np.int64),
            np.zeros(at_once, np.int64),
        )
        first, last = num_candidates * thread // threads, num_candidates * (thread + 1) // threads
        number: Any = np.int64(0)
        first_place, end_place, chunk = np.int64(0), np.int64(places), np.int64(places)
        if scores_all:
            # Each thread scores its own blocks for all rows, in the order in which they lie in memory.
            first_place, end_place = np.int64(places * thread // threads), np.int64(places * (thread + 1) // threads)
            chunk = np.int64(_CHUNK)
        for turn in range(-(-(end_place - first_place) // chunk) * list_count):
            index = turn % list_count
            start = first_place + turn // list_count * chunk
            stop = min(end_place, start + chunk)
            row, head = index // kv_heads, index % kv_heads
            own, of_list = min(head, lists - 1), slice(index * group, (index + 1) * group)
            scaled_q, its_words, its_factors, its_zeros = (
                scaled[of_list],
                words[of_list],
                factors[of_list],
                zeros[of_list],
            )
            count: Any = 0
            for place in range(start, stop):
                position = place if scores_all else np.int64(positions[row, own, place])
                if not scores_all:
                    number += position >= 0
                    if position < 0 or number <= first or number > last:
                        position = np.int64(-1)
                if position >= 0:
                    batch[count], batch_places[count] = position, place
                    following = min(place + (chunk if scores_all else np.int64(_AHEAD)), end_place - 1)
                    ahead: Any = following if scores_all else np.int64(positions[row, own, following])
                    if ahead >= 0:
                        there = np.int64(table[row, ahead]) * kv_heads + head
                        next_codes[count] = there * code_bytes
                        prefetch(means, there * (means.shape[2] * mean_units), mean_units)
                    count += 1
                if count < at_once and (place < stop - 1 or count == 0):
                    continue
                # An incomplete last batch is filled up with its first block.
                for each in range(at_once):
                    block = np.int64(table[row, batch[each if each < count else 0]]) * kv_heads + head
                    mean_offsets[each], code_offsets[each] = block * (means.shape[2] * mean_units), block * code_bytes
                for tile in range(num_tiles):
                    of_tile, at = min(tile_queries, group - tile * tile_queries), tile * 2 * lanes
                    mean_scores_of(
                        lanes,
                        kind,
                        k_dim,
                        group,
                        tile_queries,
                        at_once,
                        tile,
                        scaled_q,
                        means,
                        mean_offsets,
                        mean_scores,
                        at,
                    )
                    code_scores(
                        how, steps, group, tile_queries, block_size, at_once, tile, codes, code_offsets, next_codes,
                        its_words, its_factors, its_zeros, code_shifts, at, scores,
                    )  # fmt: skip
                    if softcap > 0:
                        size_of_tile = at_once * of_tile * block_size
                        row_softcap(scores.reshape(1, scores.size), 0, size_of_tile, np.float32(softcap) * LOG2_E)
                    if token_scores.shape[3] > 0:
                        of_head = token_scores[row, head]
                        for block in range(count):
                            for lane in range(of_tile):
                                to = (tile * tile_queries + lane) * of_head.shape[1] + batch_places[block] * block_size
                                own_at = (block * of_tile + lane) * block_size
                                copy_natural(lanes, block_size, scores, own_at, of_head, to)
                    if masses.shape[3] == 0:
                        continue
                    row_masses(
                        lanes, group, tile_queries, block_size, at_once, tile, scores, mass_shifts, block_masses, at
                    )
                    for block in range(count):
                        for lane in range(of_tile):
                            cell, g, position = block * of_tile + lane, tile * tile_queries + lane, batch[block]
                            mean = mean_scores[tile, cell]
                            score = np.float32(softcap) * tanh(mean) if softcap > 0 else mean * LN_2
                            weights[row, head, g, position] = score + size
                            masses[row, head, g, position] = block_masses[tile, cell]
                count = 0
        return np.int64(0 * code_version)

    return score


@device_function
def _number_of(positions, list_count, kv_heads, places):
    """Returns the number of candidates in `list_count` lists."""
    if positions.shape[2] == 0:
        return np.int64(list_count * places)
    found, lists = np.int64(0), positions.shape[1]
    for index in range(list_count):
        for place in range(places):
            found += positions[index // kv_heads, min(index % kv_heads, lists - 1), place] >= 0
    return found
