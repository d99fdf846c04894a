"""A decoded token's retrieval in one layer where blocks that are not attended to have an estimated share of attention.

A block's representatives say how much of the attention its keys receive; so a step can attend to as few blocks as reach
a share of it, and give the others their mean value by the weight of their estimate. All of that is one call.
"""

from typing import Any, NamedTuple

import numpy as np

from cpu_ops import (
    attention,
    block_choice,
    candidate_masses,
    chosen_tokens,
    code_masses,
    list_attention,
    mean_scores,
    rest_estimate,
    scores,
    token_attention,
    token_store,
)
from cpu_ops.chosen_blocks import SOFTMAX
from cpu_ops.estimating_kernel import Flags, kernel_for
from cpu_ops.kernel_address import address_of
from cpu_ops.parallel_region import all_threads
from cpu_ops.retrieval_step import BAD_SHAPES, REFUSALS
from cpu_ops.storage import numbers_of, storage_of
from cpu_ops.untyped_arrays import as_bytes


class Choice(NamedTuple):
    """How blocks are chosen, and what becomes of the others.

    Attributes:
        reduce: of `chosen_blocks.reduced_scores`.
        rerank: how many times the blocks that are wanted the representatives propose; the scores of the proposed
            blocks' keys choose among them. 1: the representatives choose; 0: keys of all blocks are scored.
        target: the share of the attention that as few blocks as possible are to reach; 0: as many as there is room for.
        least: with a target, so many at least.
        group_blocks: consecutive blocks of a group; 1: none.
        group_factor: how many times the blocks that are wanted, or of which single tokens are taken, the groups hold
            that are opened. The blocks of others are not scored, and count together.
        tokens: whole blocks' tokens, of which each list attends to so many at most, one by one: those of candidates
            that receive most; then `rerank` is not 1. 0: blocks are attended to as a whole.
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
        """How many times the blocks that are wanted those are of which single tokens are taken."""
        return self.rerank or (_CANDIDATES if self.target == 0 else _CANDIDATES_OF_TARGET)


_CANDIDATES, _CANDIDATES_OF_TARGET = 4, 2
"""Where the masses of all blocks are known; under a target the best alone have most of the attention. The more, the
less is overlooked, and the longer it takes."""


class EstimatingStep:
    """The call for one layer: bound to the arrays of its pool and to the shapes of its queries.

    Args:
        keys, values, representatives, lengths, group, score, softcapped, dtype, threads: as `RetrievalStep` takes them;
            score counts where there is no mean.
        has_mean: whether the first of a block's representatives is the mean of its keys and a second one their
            standard deviation; else nothing is estimated.
        value_means: [num_blocks, kv_heads, 1, v_dim] of the representatives' type; None where the rest is dropped.
        group_vectors, group_values: as representatives and value_means, of the group of which a block is the last; None
            without groups.
        key_offsets: as `attention.attend_blocks` takes them.
        key_codes: [num_blocks, kv_heads, 1, code_masses.bytes_of_block] uint8, coarse copies of the keys; None where
            candidates are scored by the keys themselves.

    Attributes:
        stores: whether it writes blocks of this storage type; else the token has to be there already.
        group, v_dim: query heads of a kv head, dimension of a value.
        by_token: whether single tokens are chosen.
        taken: [7] int64, of the last call, over all rows and lists of positions: how many of a context's blocks, or
            tokens, were attended to, how many blocks were candidates whose keys were looked at, how many were scored,
            how many groups were, how many of these were opened, of how many blocks something was attended to, and of
            how many everything. All 0 where everything was taken.

    Raises ValueError or TypeError for arrays that do not fit together.
    """

    def __init__(
        self, keys: np.ndarray, values: np.ndarray, representatives: np.ndarray, lengths: np.ndarray, group: int,
        score: str, softcapped: bool, dtype: Any, threads: int, choice: Choice, has_mean: bool,
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
            looks = code_masses.region_for(q, key_codes.shape, coarse_means.shape, keys.shape[2], coarse_means.dtype)
        elif has_mean and choice.rerank != 1:
            looks = candidate_masses.region_for(
                q, coarse.shape, coarse_means.shape, coarse.dtype, coarse_means.dtype, differ=key_offsets is not None
            )
        by_token = [0, 0, 0]
        if choice.tokens:
            if not looks:
                raise ValueError("of single tokens keys must be looked at: has_mean, and a rerank other than 1")
            region = token_attention.region_for(
                q, keys.shape, self.v_dim, keys.dtype, values.dtype, softcapped, key_offsets is not None
            )
            by_token = [chosen_tokens.choosing_region(), address_of(token_attention.kernel_for(numbers)), region]
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
                address_of(rest_estimate.kernel_for(kind.kernel_dtype.name)) if has_mean else 0,
                rest_estimate.region_for(q, self.v_dim, means.dtype) if has_mean else 0,
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
        flags = Flags(
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
        """Whether it is bound to this dtype, and to capped scores or others."""
        return self._bound == (dtype, softcapped)

    def __call__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, table: np.ndarray, first: int, end: int,
        which: int, positions: np.ndarray, allowed: np.ndarray, shared: bool, scale: float, softcap: float,
        beside: np.ndarray, out: np.ndarray, lse: np.ndarray, masses: np.ndarray,
    ) -> float:  # fmt: skip
        """Store one token of every row, unless `position` is negative, and attend to what it attends to.

        As `RetrievalStep.__call__`, with these differences. positions: entries behind the chosen ones are -1, as they
        may be where they are given; of single tokens those of the candidates, for which there must be room. beside:
        [rows, kv_heads, group] float32, the log-sum-exp of what is attended to elsewhere, which counts for the target
        and for single tokens; -inf for nothing. lse: that of `out`, with the rest where it is estimated. masses: [2,
        rows, kv_heads, group] float32, written: the log-sum-exp of what was attended to here, and that with the
        estimated mass of the rest; NaN where nothing can be estimated, and, of means without deviations, where keys are
        looked at to choose (`rerank` 0) but blocks are given: their masses would be too small.
        """
        return self._call(
            self._flags, q, k, v, position, table, first, end, which, positions, allowed, shared, scale, softcap,
            beside, out, lse, masses,
        )  # fmt: skip

    def rehearsed(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, table: np.ndarray, first: int, end: int,
        which: int, positions: np.ndarray, *others: Any,
    ) -> np.ndarray:  # fmt: skip
        """The positions of the Context's blocks to which a call with these arguments attends, be it to single tokens.

        Nothing of these blocks is read, but for keys that are looked at and have no coarse copies. The token is stored,
        what is around the Context is attended to where that counts for the choice, and no argument is written.
        """
        chosen = positions.copy()
        self._call(self._rehearsing, q, k, v, position, table, first, end, which, chosen, *others)
        return chosen

    def _call(
        self, flags: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, table: np.ndarray,
        first: int, end: int, which: int, positions: np.ndarray, allowed: np.ndarray, shared: bool, scale: float,
        softcap: float, beside: np.ndarray, out: np.ndarray, lse: np.ndarray, masses: np.ndarray,
    ) -> float:  # fmt: skip
        status = self._kernel(
            q, k, v, *self._pool, self._lengths, *self._groups, position, table, first, end, which, positions, allowed,
            shared, flags, self._target, scale, softcap, self._addresses, self._shape, self._itemsizes, beside, out,
            lse, masses, self.taken,
        )  # fmt: skip
        if status < 0:
            raise (ValueError if status == BAD_SHAPES else IndexError)(REFUSALS[status])
        return float(status)
