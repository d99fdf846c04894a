"""A decode step's retrieval in one layer, with residual attention for the blocks that are not attended.

A block's representatives estimate its attention mass. A step can therefore attend to the fewest blocks that reach a
target share, and let each other block's mean value count with its estimated mass. One call does all of this.
"""

from typing import Any, NamedTuple

import numpy as np

from hetero_kv.cpu_ops import (
    attention,
    block_choice,
    block_rerank,
    chosen_tokens,
    int4_key_scores,
    list_attention,
    mean_scores,
    residual_attention,
    scores,
    token_store,
)
from hetero_kv.cpu_ops.chosen_blocks import SOFTMAX
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.estimating_kernel import StepFlags, kernel_for
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.retrieval_step import BAD_SHAPES, NOTHING_FORBIDDEN, REFUSALS
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


_CANDIDATES, _CANDIDATES_OF_TARGET = 4, 2
"""Multiples if the masses of all blocks are known; with a target fewer suffice, as the best blocks have most of the
attention. More candidates miss fewer tokens and take longer."""


class EstimatingStep:
    """The retrieval of one layer, bound to the arrays of its pool and to the shapes of its queries.

    Args:
        keys, values, representatives, lengths, group, score, softcapped, dtype, threads: as in `RetrievalStep`; `score`
            applies only without `has_mean`.
        has_mean: whether a block's first representative is the mean of its keys and a second one, if any, their
            standard deviation; otherwise nothing is estimated.
        value_means: [num_blocks, kv_heads, 1, v_dim] of the representatives' type; None for no residual attention.
        group_vectors, group_values: as representatives and value_means, for the group whose last block this is; None
            without groups.
        key_offsets: as in `attention.attend_blocks`.
        key_codes: [num_blocks, kv_heads, 1, int4_key_scores.bytes_of_block] uint8, coarse copies of the keys; None if
            candidates are scored by their stored keys.

    Attributes:
        stores: whether calls write the token to blocks of this storage type; otherwise it must be stored before.
        group, v_dim: query heads of a kv head, dimension of a value.
        by_token: whether single tokens are chosen.
        taken: [7] int64, counts of the last call over all rows and lists: attended blocks (or tokens) of the Context,
            candidate blocks whose keys were scored, blocks scored by representatives, scored groups, opened groups,
            blocks attended at least in part, and blocks attended as a whole. All 0 if everything was attended.

    Raises ValueError or TypeError for arrays that do not fit together.
    """

    def __init__(
        self, keys: np.ndarray, values: np.ndarray, representatives: np.ndarray, lengths: np.ndarray, group: int,
        score: str, softcapped: bool, dtype: Any, threads: int, choice: BlockChoice, has_mean: bool,
        value_means: np.ndarray | None, key_codes: np.ndarray | None, key_offsets: np.ndarray | None = None,
        group_vectors: np.ndarray | None = None, group_values: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        storage, value_storage = storage_of(keys.dtype), storage_of(values.dtype)
        kind, numbers = storage_of(representatives.dtype), numbers_of(storage, value_storage)
        kv_heads, k_dim = keys.shape[1], keys.shape[3] * storage.group
        q, ids = (1, kv_heads, group, k_dim), (1, 1, 1)
        attend, self.v_dim = attention.region_for(
            q, keys.shape, values.shape, ids, ids[:2], lengths.shape, keys.dtype, values.dtype, softcapped,
            None if key_offsets is None else key_offsets.shape,
        )  # fmt: skip
        self.stores = key_offsets is None and token_store.stores(keys.dtype) and token_store.stores(values.dtype)
        coarse, coarse_means = (keys if key_codes is None else key_codes), representatives
        if key_codes is None and key_offsets is not None:
            coarse_means = key_offsets.view(np.float16)[:, :, None]
        means = value_means
        if means is None:
            means = np.empty((1, kv_heads, 1, -(-self.v_dim // kind.group)), representatives.dtype)
        shapes = representatives.shape, representatives.dtype
        looks = 0
        if has_mean and choice.rerank != 1 and key_codes is not None:
            looks = int4_key_scores.region_for(
                q, key_codes.shape, coarse_means.shape, keys.shape[2], coarse_means.dtype
            )
        elif has_mean and choice.rerank != 1:
            looks = block_rerank.region_for(
                q, coarse.shape, coarse_means.shape, coarse.dtype, coarse_means.dtype, differ=key_offsets is not None
            )
        by_token = [0, 0, 0]
        if choice.tokens:
            if not looks:
                raise ValueError(
                    "single tokens are chosen by their keys; has_mean must be set, and rerank must not be 1"
                )
            shape = group, k_dim, self.v_dim, keys.shape[2]
            region = list_attention.region(
                isa(), storage.name, value_storage.name, *shape, softcapped, key_offsets is not None, by_token=True
            )
            kernel = list_attention.kernel_for(numbers, by_token=True)
            by_token = [chosen_tokens.choosing_region(), address_of(kernel), address_of(region)]
        self._addresses = np.array(
            [
                all_threads(),
                address_of(token_store.kernel_for(storage.name, value_storage.name)) if self.stores else 0,
                0 if has_mean else address_of(scores.kernel_for(kind.kernel_dtype.name)),
                mean_scores.region_for(q, *shapes)
                if has_mean
                else scores.region_for(q, shapes[0], ids[:2], ids[:1], shapes[1], score),
                looks,
                address_of(list_attention.kernel_for(numbers)),
                attend,
                address_of(residual_attention.kernel_for(kind.kernel_dtype.name)) if has_mean else 0,
                residual_attention.region_for(q, self.v_dim, means.dtype) if has_mean else 0,
                block_choice.region(),
                *by_token,
            ],
            np.int64,
        )
        self._kernel = kernel_for(np.dtype(dtype).name)
        arrays = keys, values, representatives, means, coarse, coarse_means
        sizes = [1 if array is key_codes else storage_of(array.dtype).kernel_dtype.itemsize for array in arrays]
        self._itemsizes = np.array(sizes, np.int64)
        self._pool = *map(as_bytes, arrays), attention.NO_OFFSETS if key_offsets is None else key_offsets
        self._groups = (
            as_bytes(representatives if group_vectors is None else group_vectors),
            as_bytes(means if group_values is None else group_values),
        )
        flags = StepFlags(
            choice.reduce, choice.rerank, choice.least, has_mean, key_codes is not None,
            value_means is not None, threads,
            choice.group_blocks if group_vectors is not None else 1, choice.group_factor, choice.tokens,
            choice.candidates, rehearses=0,
        )  # fmt: skip
        self._flags, self._target = np.array(flags, np.int64), float(choice.target)
        self._rehearsing = np.array(flags._replace(rehearses=1), np.int64)
        self._shape = np.array([group, k_dim, self.v_dim], np.int64)
        self.taken, self.by_token = np.zeros(7, np.int64), choice.tokens > 0
        self._lengths, self.group, self._bound = lengths, group, (dtype, softcapped)

    def fits(self, dtype: Any, softcapped: bool) -> bool:
        """Whether the step is bound to this dtype and to soft-capped scores or not."""
        return self._bound == (dtype, softcapped)

    def __call__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray, table: np.ndarray, which: int,
        positions: np.ndarray, allowed: np.ndarray, shared: bool, scale: float, softcap: float,
        outside_lse: np.ndarray, out: np.ndarray, lse: np.ndarray, masses: np.ndarray,
        recorded: np.ndarray = NOTHING_FORBIDDEN,
    ) -> float:  # fmt: skip
        """Store one token of every row, unless its position is negative, and attend.

        As `RetrievalStep.__call__`, with these differences. ranges: unless everything is attended, all rows have the
        same Context. positions: for single tokens they are the candidates' positions, and must have capacity for them.
        outside_lse: [rows, kv_heads, group]
        float32, the log-sum-exp of what is attended elsewhere, which counts for the target and for the choice of single
        tokens; -inf for nothing. lse: that of `out`, including residual attention if it is estimated. masses: [2, rows,
        kv_heads, group] float32, written: the log-sum-exp of what was attended here, and the same with the estimated
        mass of the other blocks. The second is NaN if nothing can be estimated, and for means without deviations if
        the blocks are passed in although keys would choose them (`rerank` 0), because their masses would be too small.
        recorded: [rows, lists, capacity of positions * block size] int32 of -1, or empty. Where single tokens are
        chosen, the first numbers of each list are overwritten with their block id * block_size + offset.
        """
        return self._call(
            self._flags, q, k, v, ranges, table, which, positions, allowed, shared, scale, softcap, outside_lse, out,
            lse, masses, recorded,
        )  # fmt: skip

    def rehearsed(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray, table: np.ndarray, which: int,
        positions: np.ndarray, *others: Any,
    ) -> np.ndarray:  # fmt: skip
        """Returns the positions of the Context's blocks that a call with these arguments attends, wholly or in part.

        Reads nothing of these blocks except keys that are scored and have no coarse copies. Stores the token, attends
        to what is outside the Context if that affects the choice, and writes no argument.
        """
        chosen = positions.copy()
        self._call(self._rehearsing, q, k, v, ranges, table, which, chosen, *others)
        return chosen

    def _call(
        self, flags: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray, table: np.ndarray,
        which: int, positions: np.ndarray, allowed: np.ndarray, shared: bool, scale: float, softcap: float,
        outside_lse: np.ndarray, out: np.ndarray, lse: np.ndarray, masses: np.ndarray,
        recorded: np.ndarray = NOTHING_FORBIDDEN,
    ) -> float:  # fmt: skip
        status = self._kernel(
            q, k, v, *self._pool, self._lengths, *self._groups, ranges, table, which, positions, allowed, shared, flags,
            self._target, scale, softcap, self._addresses, self._shape, self._itemsizes, outside_lse,
            out, lse, masses, self.taken, recorded,
        )  # fmt: skip
        if status < 0:
            raise (ValueError if status == BAD_SHAPES else IndexError)(REFUSALS[status])
        return float(status)
