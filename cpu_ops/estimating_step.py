"""A decoded token's retrieval in one layer where blocks that are not attended to have an estimated share of attention.

A block's representatives say how much of the attention its keys receive; so a step can attend to as few blocks as reach
a share of it, and give the others their mean value by the weight of their estimate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cpu_ops.attention import attend_blocks, region_for
from cpu_ops.candidate_masses import candidate_masses
from cpu_ops.chosen_blocks import SOFTMAX, best_blocks, forbid_others, reduced_scores
from cpu_ops.estimated_masses import add_rest, estimated_shares, fewest_blocks, put, spread_masses, take_out
from cpu_ops.mean_scores import mean_scores
from cpu_ops.merge import merge_partials
from cpu_ops.rest_estimate import add_estimates
from cpu_ops.retrieval_step import CHOSEN, EVERYTHING
from cpu_ops.scores import block_scores
from cpu_ops.storage import storage_of
from cpu_ops.token_store import store_token, stores
from cpu_ops.top_k import select


class Choice(NamedTuple):
    """How blocks are chosen, and what becomes of the others.

    Attributes:
        reduce: of `chosen_blocks.reduced_scores`.
        rerank: how many times the blocks that are wanted the representatives propose; the scores of the proposed
            blocks' keys choose among them. 1: the representatives choose.
        target: the share of the attention that as few blocks as possible are to reach; 0: as many as there is room for.
        least: with a target, so many at least.
    """

    reduce: int = SOFTMAX
    rerank: int = 1
    target: float = 0.0
    least: int = 0


class _Estimates(NamedTuple):
    """Of each block, [rows, kv_heads, group, blocks] float32, the log-sum-exp of its keys' scores.

    Attributes:
        weights: as if all keys were their mean: by what a block's mean value counts. Keys that score far above it have
            values of their own, which the mean value is not, so that more weight makes the output worse.
        masses: how much attention they receive, which is what matters for shares.
    """

    weights: np.ndarray
    masses: np.ndarray


class EstimatingStep:
    """The call for one layer: bound to the arrays of its pool and to the shapes of its queries.

    Args:
        keys, values, representatives, lengths, group, score, softcapped, dtype, threads: as `RetrievalStep` takes them.
        has_mean: whether the first of a block's representatives is the mean of its keys and a second one their
            standard deviation; else nothing is estimated.
        value_means: [num_blocks, kv_heads, 1, v_dim] of a storage type; None where the rest is dropped.
        key_codes: [num_blocks, kv_heads, block_size, k_dim] of a storage type, how keys differ from their block's mean;
            None where candidates are scored by the keys themselves.

    Attributes:
        stores: whether it writes blocks of this storage type; else the token has to be there already.
        group, v_dim: query heads of a kv head, dimension of a value.

    Raises ValueError or TypeError for arrays that do not fit together.
    """

    def __init__(
        self, keys: np.ndarray, values: np.ndarray, representatives: np.ndarray, lengths: np.ndarray, group: int,
        score: str, softcapped: bool, dtype: Any, threads: int, choice: Choice, has_mean: bool,
        value_means: np.ndarray | None, key_codes: np.ndarray | None,
    ) -> None:  # fmt: skip
        q, ids = (1, keys.shape[1], group, keys.shape[3] * storage_of(keys.dtype).group), (1, 1, 1)
        shapes = q, keys.shape, values.shape, ids, ids[:2], lengths.shape
        self.v_dim = region_for(*shapes, keys.dtype, values.dtype, softcapped)[1]
        self.stores, self.group, self.choice = stores(keys.dtype), group, choice
        self._pool = keys, values
        self._representatives, self._value_means, self._key_codes = representatives, value_means, key_codes
        self._lengths, self._score, self._has_mean, self._threads = lengths, score, has_mean, threads
        self._bound = dtype, softcapped

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
        may be where they are given. beside: [rows, kv_heads, group] float32, the log-sum-exp of what is attended to
        elsewhere, which counts for the target; -inf for nothing. lse: that of `out`, with the rest where it is
        estimated. masses: [2, rows, kv_heads, group] float32, written: the log-sum-exp of what was attended to here,
        and that with the estimated mass of the rest; NaN where nothing can be estimated.
        """
        rows, heads, _, k_dim = q.shape
        kv_heads = self._pool[0].shape[1]
        stored = self._stored(k, v, position, table) if position >= 0 else 0.0
        queries = _float32(q).reshape(rows, kv_heads, heads // kv_heads, k_dim)
        if which == EVERYTHING:
            attended, lse[:] = self._attend(queries, table[:, None], scale, softcap)
            masses[:] = lse
        else:
            context = np.ascontiguousarray(table[:, first:end])
            window = np.concatenate([table[:, :first], table[:, end:]], axis=1)[:, None]
            scores, estimates = self._scores(queries, context, scale, softcap)
            parts = []
            if which == CHOSEN:
                if self.choice.target:
                    parts = [self._attend(queries, window, scale, softcap)]
                    beside = np.logaddexp(beside, parts[0][1])
                    window = window[:, :, :0]
                chosen = scores, estimates, beside, allowed, shared, positions
                self._choose(queries, context, scale, softcap, *chosen)
            ids, counts = _lists(window, context, positions)
            parts.append(self._attend(queries, ids, scale, softcap, counts))
            attended, lse[:] = parts[0]
            if len(parts) > 1:
                attended, lse[:] = merge_partials(*(np.stack(each) for each in zip(*parts, strict=True)))
            self._add_rest(context, positions, estimates, attended, lse, masses)
        _write(attended.reshape(out.shape), out)
        return stored

    def _stored(self, k: np.ndarray, v: np.ndarray, position: int, table: np.ndarray) -> float:
        new_keys, new_values = (np.ascontiguousarray(_float32(new)[:, :, 0]) for new in (k, v))
        return store_token(new_keys, new_values, *self._pool, table, position)

    def _attend(
        self, queries: np.ndarray, ids: np.ndarray, scale: float, softcap: float, counts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if counts is None:
            counts = np.full(ids.shape[:2], ids.shape[2], np.int32)
        lists = np.ascontiguousarray(ids), counts, self._lengths
        return attend_blocks(queries, *self._pool, *lists, scale, softcap, threads=self._threads)

    def _scores(
        self, queries: np.ndarray, context: np.ndarray, scale: float, softcap: float
    ) -> tuple[np.ndarray, _Estimates | None]:
        """What blocks are chosen by, and what is estimated of them, where anything is."""
        if self._has_mean:
            means, likely = mean_scores(queries, self._representatives, context, scale, softcap)
            size = self._pool[0].shape[2]
            return likely, _Estimates(means + np.float32(np.log(size)), spread_masses(means, likely, size))
        counts = np.full(len(context), context.shape[1], np.int32)
        scores = block_scores(queries, self._representatives, context, counts, self._score, threads=self._threads)
        scores *= np.float32(scale)
        return (softcap * np.tanh(scores / softcap)).astype(np.float32) if softcap else scores, None

    def _choose(
        self, queries: np.ndarray, context: np.ndarray, scale: float, softcap: float, scores: np.ndarray,
        estimates: _Estimates | None, beside: np.ndarray, allowed: np.ndarray, shared: bool, positions: np.ndarray,
    ) -> None:  # fmt: skip
        """Write which blocks are attended to; candidates that were looked at have their masses in `estimates` then."""
        choice, most = self.choice, positions.shape[2]
        if estimates is None or (choice.rerank == 1 and not choice.target):
            positions[:] = best_blocks(scores, most, allowed, shared, choice.reduce)
            return
        reduced = reduced_scores(scores, shared, choice.reduce)
        if allowed.shape[2]:
            forbid_others(reduced, allowed)
        counts = self._counts(reduced, estimates.masses, beside, shared, most)
        if choice.rerank > 1:
            wide = np.minimum(counts * choice.rerank, allowed.shape[2] or context.shape[1]).astype(np.int32)
            candidates = _best(reduced, wide, int(wide.max())).reshape(*positions.shape[:2], int(wide.max()))
            keys, means = self._pool[0], None
            if self._key_codes is not None:
                keys, means = self._key_codes, self._representatives
            candidate_masses(queries, keys, means, context, candidates, scale, softcap, estimates.weights)
            put(estimates.masses, candidates, estimates.weights)
            reduced = reduced_scores(estimates.masses, shared, choice.reduce)
            forbid_others(reduced, candidates)
            counts = self._counts(reduced, estimates.masses, beside, shared, most)
        positions[:] = _best(reduced, counts, most).reshape(positions.shape)

    def _counts(
        self, reduced: np.ndarray, masses: np.ndarray, beside: np.ndarray, shared: bool, most: int
    ) -> np.ndarray:
        """How many blocks each list is to have."""
        if not self.choice.target:
            return np.full(len(reduced), most, np.int32)
        shares, before = estimated_shares(masses, beside, shared)
        return fewest_blocks(reduced, shares, before, self.choice.target, self.choice.least, most)

    def _add_rest(
        self, context: np.ndarray, positions: np.ndarray, estimates: _Estimates | None, attended: np.ndarray,
        lse: np.ndarray, masses: np.ndarray,
    ) -> None:  # fmt: skip
        masses[0], masses[1] = lse, np.nan
        if estimates is None:
            return
        take_out(estimates.masses, positions)
        add_rest(estimates.masses, lse, masses[1])
        if self._value_means is not None:
            take_out(estimates.weights, positions)
            add_estimates(self._value_means, context, estimates.weights, attended, lse)


def _float32(numbers: np.ndarray) -> np.ndarray:
    """Numbers of a step's dtype, the bits of bfloat16 among them, as float32."""
    return numbers if numbers.dtype == np.float32 else (numbers.astype(np.uint32) << 16).view(np.float32)


def _write(numbers: np.ndarray, out: np.ndarray) -> None:
    """Write float32 as `out` holds them: as they are, or as the bits of bfloat16, to nearest even."""
    if out.dtype == np.float32:
        out[:] = numbers
        return
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    out[:] = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _best(reduced: np.ndarray, counts: np.ndarray, most: int) -> np.ndarray:
    """Positions of the best of each list, ascending, -1 behind: [lists, most] int32."""
    positions = np.full((len(reduced), most), -1, np.int32)
    select(reduced, np.full(len(reduced), reduced.shape[1], np.int32), counts, positions)
    return positions


def _lists(window: np.ndarray, context: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of a window [rows, 1, n], then those at positions [rows, lists, m] of the context, and how many."""
    rows, lists, _ = positions.shape
    chosen = np.take_along_axis(np.broadcast_to(context[:, None], (rows, lists, context.shape[1])), positions, axis=2)
    ids = np.concatenate([np.broadcast_to(window, (rows, lists, window.shape[2])), chosen], axis=2)
    return ids, (window.shape[2] + (positions >= 0).sum(axis=2)).astype(np.int32)
