"""A decode step's retrieval in one layer, in one call: store the token, choose blocks, attend, estimate the rest.

Representatives score blocks. They may also estimate a block's attention mass. A step can then attend to the fewest
blocks that reach a target share, and let each other block's mean value count with its estimated mass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hetero_kv.cpu_ops import (
    attention,
    block_choice,
    block_rerank,
    causal_attention,
    chosen_tokens,
    int4_key_scores,
    list_attention,
    mean_scores,
    residual_attention,
    scores,
    token_store,
)
from hetero_kv.cpu_ops.chosen_blocks import MEAN, SOFTMAX
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.kernel_queue import KernelQueue, prepare_queued
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.retrieval_kernel import kernel_for
from hetero_kv.cpu_ops.step_contract import BAD_SHAPES, NOTHING_FORBIDDEN, REFUSALS, WHOLE, StepSettings
from hetero_kv.cpu_ops.storage import numbers_of, storage_of
from hetero_kv.cpu_ops.untyped_arrays import as_bytes


class BlockChoice(NamedTuple):
    """How blocks are chosen.

    Attributes:
        reduce: as in `chosen_blocks.reduced_scores`.
        rerank: representatives propose this many times the blocks to choose, and the scores of the proposed blocks'
            keys choose among them. 1: representatives choose alone. 0: the keys of all blocks are scored.
        target: the share of the attention to reach with as few blocks as possible; 0: choose as many as fit.
        least: the fewest blocks to choose, with a target.
        group_blocks: consecutive blocks of a group; 1: no groups.
        group_factor: opened groups contain this many times the blocks to choose (or the blocks whose single tokens are
            chosen). Blocks of other groups are not scored; each such group counts as a whole.
        tokens: the most single tokens, a multiple of the block size, that each list attends: those of the candidate
            blocks that receive the most attention. Requires `rerank` other than 1. 0: whole blocks are attended.
    """

    reduce: int = SOFTMAX
    rerank: int = 1
    target: float = 0.0
    least: int = 0
    group_blocks: int = 1
    group_factor: int = 1
    tokens: int = 0

    @property
    def candidates(self) -> int:
        """The number of blocks whose single tokens are candidates, as a multiple of the blocks to choose."""
        return self.rerank or (_CANDIDATES if self.target == 0 else _CANDIDATES_OF_TARGET)


BY_MEAN_SCORE = BlockChoice(MEAN)
"""The choice by the mean of a kv head's scores, without estimates."""

_CANDIDATES, _CANDIDATES_OF_TARGET = 4, 2
"""Multiples if the masses of all blocks are known; with a target fewer suffice, as the best blocks have most of the
attention. More candidates miss fewer tokens and take longer."""


class StepPool(NamedTuple):
    """The arrays of a layer that a step reads and writes.

    Attributes:
        keys: [num_blocks, kv_heads, block_size, k_dim], values: [num_blocks, kv_heads, block_size, v_dim],
            representatives: [num_blocks, kv_heads, representative_num, k_dim], of storage types (`cpu_ops.storage`).
        lengths: [num_blocks] int32, tokens in each block.
        key_offsets: as in `attention.attend_blocks`.
        value_means: [num_blocks, kv_heads, 1, v_dim] of the representatives' type; None for no residual attention.
        key_codes: [num_blocks, kv_heads, 1, int4_key_scores.bytes_of_block] uint8, coarse copies of the keys; None if
            candidates are scored by their stored keys.
        group_vectors, group_values: as representatives and value_means, for the group whose last block this is; None
            without groups.
    """

    keys: np.ndarray
    values: np.ndarray
    representatives: np.ndarray
    lengths: np.ndarray
    key_offsets: np.ndarray | None = None
    value_means: np.ndarray | None = None
    key_codes: np.ndarray | None = None
    group_vectors: np.ndarray | None = None
    group_values: np.ndarray | None = None


class StepEstimates(NamedTuple):
    """What a call with estimates reads and writes besides the arguments of all calls.

    Attributes:
        outside_lse: [rows, kv_heads, group] float32, the log-sum-exp of what is attended elsewhere, which counts for
            the target and for the choice of single tokens; -inf for nothing.
        masses: [2, rows, kv_heads, group] float32, written: the log-sum-exp of what was attended here, and the same
            with the estimated mass of the other blocks. The second is NaN if nothing can be estimated, and for means
            without deviations if the blocks are passed in although keys would choose them (`rerank` 0), because their
            masses would be too small.
        taken: [rows, 7] int64, written: each row's counts, over all lists (columns: `step_contract`). All 0 if
            everything was attended.
        recorded: [rows, lists, capacity of positions * block size] int32 of -1, or empty. Where single tokens are
            chosen, the first numbers of each list are overwritten with their block id * block_size + offset.
    """

    outside_lse: np.ndarray
    masses: np.ndarray
    taken: np.ndarray
    recorded: np.ndarray

    @classmethod
    def of(
        cls, lse: np.ndarray, outside_lse: np.ndarray | None = None, recorded: np.ndarray = NOTHING_FORBIDDEN
    ) -> "StepEstimates":
        """Arrays for a call whose `lse` this is; with nothing attended elsewhere unless `outside_lse` is passed."""
        if outside_lse is None:
            outside_lse = np.full(lse.shape, -np.inf, np.float32)
        masses, taken = np.empty((2, *lse.shape), np.float32), np.empty((len(lse), WHOLE + 1), np.int64)
        return cls(outside_lse, masses, taken, recorded)


class RetrievalStep:
    """The retrieval of one layer, bound to the arrays of its pool and to the shapes of its queries.

    Args:
        pool: the layer's arrays.
        group: query heads of a kv head.
        score: `mode` of `cpu_ops.scores.block_scores`; applies only without `has_mean`.
        softcapped: whether attention scores are soft-capped.
        dtype: of queries, keys, values and outputs: float32, or uint16 for the bits of bfloat16.
        threads: number of threads.
        choice: how blocks are chosen.
        has_mean: whether blocks' masses are estimated: a block's first representative is the mean of its keys and a
            second one, if any, their standard deviation.
        shares_readings: whether consecutive tokens of a long sequence that attend to everything share a reading of it
            (`causal_attention`).

    Attributes:
        stores: whether calls write the token to blocks of these storage types; otherwise it must be stored before.
            Steps with key_offsets do not store.
        bound_to: `dtype` and `softcapped`.
        group, v_dim: query heads of a kv head, dimension of a value.
        by_token: whether single tokens are chosen.
        estimates: whether calls take `StepEstimates`. The others choose by scores alone, and report none.

    Raises ValueError or TypeError for arrays and choices that do not fit together.
    """

    def __init__(
        self, pool: StepPool, group: int, score: str, softcapped: bool, dtype: Any, threads: int,
        choice: BlockChoice = BY_MEAN_SCORE, has_mean: bool = False, shares_readings: bool = False,
    ) -> None:  # fmt: skip
        if not has_mean and (choice.rerank != 1 or choice.target or choice.tokens):
            raise ValueError(
                f"candidates, a target and single tokens need estimates: has_mean must be set for {choice}"
            )
        if choice.tokens and choice.rerank == 1:
            raise ValueError(f"single tokens are chosen by their keys: rerank must not be 1 for {choice}")
        keys, values, representatives, lengths, key_offsets, *_ = pool
        storage, value_storage, kind = map(storage_of, (keys.dtype, values.dtype, representatives.dtype))
        kv_heads, k_dim = keys.shape[1], keys.shape[3] * storage.group
        q, ids = (1, kv_heads, group, k_dim), (1, 1, 1)
        attend, self.v_dim = attention.region_for(
            q, keys.shape, values.shape, ids, ids[:2], lengths.shape, keys.dtype, values.dtype, softcapped,
            None if key_offsets is None else key_offsets.shape,
        )  # fmt: skip
        self.stores = key_offsets is None and token_store.stores(keys.dtype) and token_store.stores(values.dtype)
        self.estimates = has_mean or choice.reduce >= SOFTMAX or pool.group_vectors is not None
        self.by_token, self.group, self.bound_to = choice.tokens > 0, group, (dtype, softcapped)
        if has_mean:
            scorer, score_region = 0, mean_scores.region_for(q, representatives.shape, representatives.dtype)
        else:
            scorer = address_of(scores.kernel_for(kind.kernel_dtype.name))
            score_region = scores.region_for(q, representatives.shape, ids[:2], ids[:1], representatives.dtype, score)
        store = address_of(token_store.kernel_for(storage.name, value_storage.name)) if self.stores else 0
        attender = address_of(list_attention.kernel_for(numbers_of(storage, value_storage)))
        calls = [all_threads(), store, scorer, score_region, attender, attend, block_choice.region()]
        # The arrays that the step reads instead of those that the pool lacks are never read.
        means = pool.value_means
        if means is None:
            means = np.empty((1, kv_heads, 1, -(-self.v_dim // kind.group)), representatives.dtype)
        coarse = keys if pool.key_codes is None else pool.key_codes
        coarse_means = representatives
        if pool.key_codes is None and key_offsets is not None:
            coarse_means = key_offsets.view(np.float16)[:, :, None]
        look = self._look_region(pool, q, coarse_means) if has_mean and choice.rerank != 1 else 0
        rest = residual_attention.region_for(q, self.v_dim, means.dtype) if has_mean else 0
        rester = address_of(residual_attention.kernel_for(kind.kernel_dtype.name)) if has_mean else 0
        calls += [look, rester, rest, *(self._token_calls(pool, q, softcapped) if self.by_token else (0, 0, 0))]
        causal = 0, 0, 0
        if shares_readings and self.stores:
            causal = causal_attention.regions_for(
                keys.dtype, values.dtype, group, k_dim, self.v_dim, softcapped, in_bfloat16=np.dtype(dtype) == np.uint16
            )
        calls += causal[:2]
        coarse_bytes = 1 if coarse is pool.key_codes else storage.kernel_dtype.itemsize
        settings = StepSettings(
            group, k_dim, self.v_dim, keys.shape[2], threads,
            storage.kernel_dtype.itemsize, value_storage.kernel_dtype.itemsize, kind.kernel_dtype.itemsize,
            storage_of(means.dtype).kernel_dtype.itemsize, coarse_bytes,
            storage_of(coarse_means.dtype).kernel_dtype.itemsize,
            choice.reduce, choice.rerank, choice.least, choice.group_blocks if pool.group_vectors is not None else 1,
            choice.group_factor, choice.tokens, choice.candidates, has_mean, pool.key_codes is not None,
            pool.value_means is not None, fewest_by_tiles=causal[2], rehearses=0,
        )  # fmt: skip
        self._calls, self._target = np.array(calls, np.int64), float(choice.target)
        self._settings = np.array(settings, np.int64)
        self._rehearsing = np.array(settings._replace(rehearses=1), np.int64)
        derived = None
        if self.estimates:
            vectors = representatives if pool.group_vectors is None else pool.group_vectors
            values_of_groups = means if pool.group_values is None else pool.group_values
            derived = tuple(map(as_bytes, (means, coarse, coarse_means, vectors, values_of_groups)))
        offsets = attention.NO_OFFSETS if key_offsets is None else key_offsets
        self._pool = as_bytes(keys), as_bytes(values), offsets, as_bytes(representatives), lengths, derived
        self._kernel = kernel_for(np.dtype(dtype).name, self.estimates)
        prepare_queued(self._kernel)

    @staticmethod
    def _look_region(pool: StepPool, q: tuple[int, ...], means: np.ndarray) -> int:
        """The region that scores the keys of candidates."""
        if pool.key_codes is not None:
            block_size = pool.keys.shape[2]
            return int4_key_scores.region_for(q, pool.key_codes.shape, means.shape, block_size, means.dtype)
        shapes = q, pool.keys.shape, means.shape
        return block_rerank.region_for(*shapes, pool.keys.dtype, means.dtype, differ=pool.key_offsets is not None)

    def _token_calls(self, pool: StepPool, q: tuple[int, ...], softcapped: bool) -> tuple[int, int, int]:
        """The region that chooses single tokens, and the kernel and the region that attend to them."""
        storage, value_storage = storage_of(pool.keys.dtype), storage_of(pool.values.dtype)
        shape = self.group, q[3], self.v_dim, pool.keys.shape[2]
        region = list_attention.region(
            isa(), storage.name, value_storage.name, *shape, softcapped, pool.key_offsets is not None, by_token=True
        )
        kernel = list_attention.kernel_for(numbers_of(storage, value_storage), by_token=True)
        return chosen_tokens.choosing_region(), address_of(kernel), address_of(region)

    def __call__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray, table: np.ndarray, which: int,
        positions: np.ndarray, allowed: np.ndarray, shared: bool, scale: float, softcap: float,
        out: np.ndarray, lse: np.ndarray, estimates: StepEstimates | None = None,
    ) -> float:  # fmt: skip
        """Store one token of every row, unless its position is negative, and attend.

        q: [rows, heads, 1, k_dim], k: [rows, kv_heads, 1, k_dim], v: [rows, kv_heads, 1, v_dim] and out [rows, heads,
        1, v_dim], of the bound dtype. ranges: [3, rows] int64, of each row the position of the token in its sequence,
        and the first and the end of the blocks of its Context. table: [rows, blocks] int32, ids of each row's blocks in
        order, padded with -1. which: EVERYTHING, AS_GIVEN or CHOSEN. positions: [rows, 1 or kv_heads, count] int32, in
        the Context, ascending, padded with -1; written for CHOSEN. For single tokens they are the blocks of the
        candidates, and count must suffice for these. allowed: [rows, 1 or kv_heads, n] int32, the positions to score
        and choose from, ascending, n >= count; n = 0 allows all. shared: whether all kv heads share one list of
        positions. scale, softcap: as in `attention.attend_blocks`. lse: [rows, kv_heads, group] float32, written: that
        of `out`, including residual attention. estimates: required if `self.estimates`, otherwise not read. The caller
        must own `threads.one_kernel_at_a_time`.

        Each row is attended to as in a call of its own, whatever the lengths of the others; a row with an empty Context
        attends to all its blocks. Consecutive tokens of one sequence are neighbouring rows in their order; each sees
        the ones before it, and `lengths` of their blocks are written.

        Returns the largest magnitude that was stored (0 if nothing was), or infinity or NaN if one was stored. Raises
        IndexError for positions, ids and lengths outside the pool, ValueError for other shapes and TypeError for other
        types.
        """
        inputs = q, k, v, ranges, table, which, positions, allowed, shared, scale, softcap
        return _largest(self._kernel(*self._arguments(self._settings, *inputs, out, lse, estimates)))

    def rehearsed(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray, table: np.ndarray, which: int,
        positions: np.ndarray, *others: Any,
    ) -> np.ndarray:  # fmt: skip
        """Returns the positions of the Context's blocks that a call with these arguments attends, wholly or in part.

        Reads nothing of these blocks except keys that are scored and have no coarse copies. Stores the token, attends
        to what is outside the Context if that affects the choice, and writes no argument but `estimates.taken`.
        """
        chosen = positions.copy()
        _largest(self._kernel(*self._arguments(self._rehearsing, q, k, v, ranges, table, which, chosen, *others)))
        return chosen

    def add_to(self, queue: KernelQueue, check: Callable[[float], None], *arguments: Any) -> None:
        """Add a call with these arguments to a queue; `check` gets its result unless that is 0."""
        kernel_arguments = self._arguments(self._settings, *arguments)
        queue.add(self._kernel, *kernel_arguments, check=lambda status: check(_largest(status)))

    def _arguments(
        self, settings: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray, table: np.ndarray,
        which: int, positions: np.ndarray, allowed: np.ndarray, shared: bool, scale: float, softcap: float,
        out: np.ndarray, lse: np.ndarray, estimates: StepEstimates | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The kernel's arguments."""
        results = tuple(estimates) if self.estimates and estimates is not None else None
        return (
            q, k, v, *self._pool, ranges, table, which, positions, allowed, shared, scale, softcap, self._target,
            self._calls, settings, out, lse, results,
        )  # fmt: skip


def _largest(status: float) -> float:
    """A kernel's result as that of `RetrievalStep`; raises its error."""
    if status < 0:
        raise (ValueError if status == BAD_SHAPES else IndexError)(REFUSALS[status])
    return float(status)
