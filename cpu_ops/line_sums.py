"""How much attention a few queries pay to each token and at each distance: by it lines and slashes are chosen."""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from cpu_ops.code_version import CODE_VERSION
from cpu_ops.cpu_features import isa
from cpu_ops.exponential import LOG2_E, row_exp2, row_softcap
from cpu_ops.inner import inner
from cpu_ops.kernel_address import address_of
from cpu_ops.number_bits import number
from cpu_ops.parallel_region import REGION, arguments_at, call_region, region_arguments
from cpu_ops.row_maximum import row_max
from cpu_ops.threads import kernel_threads

_INT1 = types.Array(types.int64, 1, "C")


def line_sums(
    past: np.ndarray, new: np.ndarray, scale: float, softcap: float = 0.0, threads: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Attention by token and by distance of the last queries of a sequence, summed over these, for each head.

    past, new: [heads, queries, past] and [heads, queries, n], products of the queries with the keys before a chunk of n
    tokens and with its own; both float32, or both bits of bfloat16 (uint16). The last query is the last token. scale
    and softcap (0: none) as for `run_attention.attend_runs`. threads: how many to use (None: Numba's setting).

    Returns two [heads, past + n] float32. Raises ValueError for shapes or numbers that do not fit together.
    """
    heads, queries, n = new.shape
    if past.shape[:2] != (heads, queries) or past.dtype != new.dtype or not 0 < queries <= n:
        raise ValueError(f"products {past.shape} {past.dtype} and {new.shape} {new.dtype} do not fit")
    if new.dtype not in (np.uint16, np.float32):
        raise ValueError(f"products are {new.dtype}; they must be float32, or bits of bfloat16")
    by_token, by_place = np.zeros((2, heads, past.shape[2] + n), np.float32)
    variant = "bfloat16" if new.dtype == np.uint16 else "float32"
    arguments = (
        np.ascontiguousarray(past), np.ascontiguousarray(new), float(scale), float(softcap), by_token, by_place,
    )  # fmt: skip
    region = address_of(_region(variant, isa()))
    with kernel_threads(threads) as used:
        call_region("line sums", variant, region, arguments, used)
    return by_token, np.ascontiguousarray(by_place[:, ::-1])


def compile_for(in_bfloat16: bool) -> None:
    """Compile the kernel, or load it from Numba's on-disk cache, before the first prompt needs it."""
    _region("bfloat16" if in_bfloat16 else "float32", isa())


@region_arguments("line sums")
def _arguments(variant: str) -> tuple[Any, ...]:
    """(past, new, scale, softcap, by_token, by_place): the latter from the farthest token to the query's own."""
    products = types.Array(types.uint16 if variant == "bfloat16" else types.float32, 3, "C")
    sums = types.Array(types.float32, 2, "C")
    return products, products, types.float64, types.float64, sums, sums


# Parts of rows as arrays of their own: what is counted from a number that might be negative is not vectorised.
@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def _scaled(products, factor, target):
    for t in range(products.size):
        target[t] = number(products[t]) * factor


@inner(fastmath={"contract", "nsz"}, error_model="numpy")
def _add(weights, share, by_token, by_place):
    for t in range(weights.size):
        weight = weights[t] * share
        by_token[t] += weight
        by_place[t] += weight


@cache
def _region(variant: str, instructions: str) -> Any:
    """Compile a thread's share: every so many heads."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
    def add(thread, threads, arguments):
        past, new, scale, softcap, by_token, by_place = arguments_at("line sums", variant, arguments)
        queries, before, tokens = past.shape[1], past.shape[2], by_token.shape[1]
        factor = np.float32(scale / softcap if softcap > 0 else scale * LOG2_E)
        weights = np.empty((1, tokens), np.float32)
        for head in range(thread, past.shape[0], threads):
            for i in range(queries):
                seen = tokens - queries + i + 1
                _scaled(past[head, i], factor, weights[0])
                _scaled(new[head, i, : seen - before], factor, weights[0, before:])
                if softcap > 0:
                    row_softcap(weights, 0, seen, np.float32(softcap) * LOG2_E)
                share = np.float32(1) / row_exp2(weights, 0, seen, row_max(weights, 0, seen))
                # The query's own token comes last.
                _add(weights[0, :seen], share, by_token[head], by_place[head, tokens - seen :])
        return np.int64(0 * code_version)

    return add


@njit(_INT1(_INT1, types.int64, types.int64, types.int64), cache=True, nogil=True)
def distances_within(ranked, block, covered, budget):
    """The first of the ranked distances, as many as let a block of queries see no more than `budget` tokens.

    ranked: distances, best first. block: queries of a block; each sees a key at each of the distances, and the block
    what any of them sees. covered: distances below this are seen anyway, and cost nothing.
    """
    most = np.int64(covered)
    for distance in ranked:
        most = max(most, distance + 1)
    # Tokens by their distance from the block's last query.
    seen = np.zeros(most + block, np.bool_)
    seen[: covered + block - 1] = True
    count = np.int64(0)
    taken = np.empty(ranked.size, np.int64)
    for distance in ranked:
        if distance < covered:
            continue
        added = np.int64(0)
        for at in range(distance, distance + block):
            added += not seen[at]
        if added > budget:
            break
        budget -= added
        seen[distance : distance + block] = True
        taken[count] = distance
        count += 1
    return taken[:count].copy()
