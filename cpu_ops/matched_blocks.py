"""Blocks of keys that a few queries of each block of queries match best, of those that it does not attend to anyway.

What queries in the middle of a prompt look for by its content, such as the earlier place where their own words stood,
lies on no line and no diagonal.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.cpu_features import isa
from cpu_ops.exponential import LOG2_E, row_exp2, row_softcap
from cpu_ops.inner import inner
from cpu_ops.kernel_address import address_of
from cpu_ops.key_runs import QUERY_BLOCK
from cpu_ops.number_bits import number
from cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from cpu_ops.row_maximum import row_max
from cpu_ops.threads import kernel_threads


def matched_blocks(
    past: np.ndarray, new: np.ndarray, positions: np.ndarray, runs: np.ndarray, starts: np.ndarray, scale: float,
    softcap: float = 0.0, threads: int | None = None,
) -> np.ndarray:  # fmt: skip
    """The attention that each block of keys receives from a few queries of each block of queries: the most by any.

    past, new: [heads, blocks * queries, past] and [heads, blocks * queries, n], products of a few queries of each block
    of queries with the keys before a chunk of n tokens and with its own; both float32, or both bits of bfloat16
    (uint16). positions: [blocks * queries] int64, where the queries are in the chunk. runs: [count, 2] int32 and
    starts: [heads, blocks + 1] int64, what the blocks of queries attend to (as `key_runs.line_runs`). scale and softcap
    (0: none) as for `run_attention.attend_runs`. threads: how many to use (None: Numba's setting).

    Returns [heads, blocks, key blocks] float32: the largest share of a query's attention that a block's keys have which
    no run names; 0 where there is none. Key blocks have `QUERY_BLOCK` tokens. Raises ValueError for arrays that do not
    fit together.
    """
    heads, count, n = new.shape
    blocks = starts.shape[1] - 1
    if past.shape[:2] != (heads, count) or past.dtype != new.dtype or positions.shape != (count,):
        raise ValueError(f"products {past.shape} {past.dtype}, {new.shape} {new.dtype} and positions "
                         f"{positions.shape} do not fit")  # fmt: skip
    if new.dtype not in (np.uint16, np.float32):
        raise ValueError(f"products are {new.dtype}; they must be float32, or bits of bfloat16")
    total = past.shape[2] + n
    are_inside = count == 0 or (positions.min() >= 0 and positions.max() < n)
    if starts.shape[0] != heads or blocks < 1 or count % blocks or not are_inside:
        raise ValueError(f"positions {positions.shape} and starts {starts.shape} do not fit {heads} heads, {n} tokens")
    if starts.min() < 0 or starts.max() > len(runs) or (len(runs) and (runs.min() < 0 or runs.max() > total)):
        raise ValueError(f"starts and runs must lie within {len(runs)} runs and {total} tokens")
    out = np.zeros((heads, blocks, -(-total // QUERY_BLOCK)), np.float32)
    arguments = (
        np.ascontiguousarray(past), np.ascontiguousarray(new), np.ascontiguousarray(positions, np.int64),
        np.ascontiguousarray(runs, np.int32), np.ascontiguousarray(starts, np.int64),
        float(scale), float(softcap), out,
    )  # fmt: skip
    variant = "bfloat16" if new.dtype == np.uint16 else "float32"
    region = address_of(_region(variant, isa()))
    with kernel_threads(threads) as used:
        call_region("match blocks", variant, region, arguments, used)
    return out


def compile_for(in_bfloat16: bool) -> None:
    """Compile the kernel, or load it from Numba's on-disk cache, before the first prompt needs it."""
    _region("bfloat16" if in_bfloat16 else "float32", isa())


@region_arguments("match blocks")
def _arguments(variant: str) -> tuple[Any, ...]:
    """(past, new, positions, runs, starts, scale, softcap, out), as `matched_blocks` takes and gives them."""
    products = types.Array(types.uint16 if variant == "bfloat16" else types.float32, 3, "C")
    int64, runs = types.int64, types.Array(types.int32, 2, "C")
    lists = types.Array(int64, 1, "C"), runs, types.Array(int64, 2, "C")
    return products, products, *lists, types.float64, types.float64, types.Array(types.float32, 3, "C")


# Parts of rows as arrays of their own: what is counted from a number that might be negative is not vectorised.
@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def _scaled(products, factor, target):
    for t in range(products.size):
        target[t] = number(products[t]) * factor


@inner(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")
def _sum(numbers):
    total = np.float32(0)
    for t in range(numbers.size):
        total += numbers[t]
    return total


@cache
def _region(variant: str, instructions: str) -> Any:
    """Compile a thread's share: every so many blocks of queries of all heads."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def match(thread, threads, arguments):
        past, new, positions, runs, starts, scale, softcap, out = arguments_at("match blocks", variant, arguments)
        before, (heads, blocks, key_blocks) = past.shape[2], out.shape
        queries = positions.size // blocks
        factor = np.float32(scale / softcap if softcap > 0 else scale * LOG2_E)
        weights = np.zeros((1, key_blocks * QUERY_BLOCK), np.float32)
        for item in range(thread, heads * blocks, threads):
            head, block = item // blocks, item % blocks
            for i in range(block * queries, (block + 1) * queries):
                seen = before + positions[i] + 1
                _scaled(past[head, i], factor, weights[0])
                _scaled(new[head, i, : seen - before], factor, weights[0, before:])
                if softcap > 0:
                    row_softcap(weights, 0, seen, np.float32(softcap) * LOG2_E)
                share = np.float32(1) / row_exp2(weights, 0, seen, row_max(weights, 0, seen))
                stop = -(-seen // QUERY_BLOCK)
                for t in range(seen, stop * QUERY_BLOCK):
                    weights[0, t] = 0
                for run in range(starts[head, block], starts[head, block + 1]):
                    for t in range(runs[run, 0], min(np.int64(runs[run, 1]), seen)):
                        weights[0, t] = 0
                for key_block in range(stop):
                    own = share * _sum(weights[0, key_block * QUERY_BLOCK : (key_block + 1) * QUERY_BLOCK])
                    if own > out[head, block, key_block]:
                        out[head, block, key_block] = own
        return np.int64(0 * code_version)

    return match
