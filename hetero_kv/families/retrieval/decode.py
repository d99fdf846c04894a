"""The part of retrieval attention that chooses a decoded token's blocks, and has them attended to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cpu_ops.estimated_masses import covered_share
from cpu_ops.estimating_step import EstimatingStep
from cpu_ops.retrieval_step import AS_GIVEN, CHOSEN, EVERYTHING, NOTHING_FORBIDDEN, RetrievalStep
from cpu_ops.threads import one_kernel_at_a_time
from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.adapter.kernel_arrays import ARRAY_DTYPES
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.retrieval.fetching import Fetching
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.prefill import RetrievalPrefill
from hetero_kv.families.retrieval.reading import Reading, Taken
from hetero_kv.families.retrieval.recall import covered_mass
from hetero_kv.families.retrieval.state import SELECTED_AT, SELECTIONS, SharedSelections, with_entered
from hetero_kv.store.pool import BlockPool


class RetrievalDecode(RetrievalPrefill):
    """What `RetrievalAttention` does with blocks in DRAM when a token is decoded."""

    @property
    def _takes_largest(self) -> bool:
        """Whether a kv head's score is its group's largest, and not their mean."""
        return self.settings.group_reduce == "max"

    def _bound_step(
        self, pool: BlockPool, lengths: np.ndarray, group: int, softcapped: bool, dtype: torch.dtype
    ) -> RetrievalStep | EstimatingStep:
        """The native call for a layer with this pool, `lengths` tokens in its blocks, for queries of `dtype`."""
        arrays = pool.key_array, pool.value_array, pool.representative_array, lengths
        kind = self.representative_type
        # Nothing is scored where everything is attended to.
        score = "dot" if self.budget is None else kind.score
        bound = *arrays, group, score, softcapped, ARRAY_DTYPES.get(dtype, np.float32), self.threads
        if self.choice is None:
            return RetrievalStep(*bound, pool.offset_array)
        beside = pool.value_mean_array, pool.key_code_array, pool.offset_array, pool.group_array, pool.group_value_array
        return EstimatingStep(*bound, self.choice, kind.has_mean, *beside)

    def _native_of(
        self, layer: RetrievalLayer, blocks: StepBlocks, call: AttentionCall, dtype: torch.dtype
    ) -> RetrievalStep | EstimatingStep:
        """The layer's native call, bound anew where it was bound to other numbers."""
        native, softcapped = layer.token_step, call.softcap is not None
        if native is None or not native.fits(ARRAY_DTYPES[dtype], softcapped):
            assert layer.pool is not None
            group = call.q.shape[1] // call.k.shape[1]
            native = self._bound_step(layer.pool, blocks.lengths, group, softcapped, dtype)
            layer.token_step, layer.reading = native, Reading.of(layer.pool, layer.window)
        return native

    def _attend_natively(
        self, native: RetrievalStep | EstimatingStep, layer: RetrievalLayer, step: Step, blocks: StepBlocks,
        q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int | None, scale: float, softcap: float,
        out: np.ndarray, lse: np.ndarray, beside: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Taken] | None:  # fmt: skip
        """Have the token stored, unless `position` is None, its blocks chosen and attended to.

        beside: the log-sum-exp of what is attended to elsewhere, as `lse`. Returns the `masses` of `EstimatingStep` and
        what was taken; None where nothing is estimated.
        """
        table, first, end = blocks.table, min(layer.layout.sink_blocks, blocks.closed), blocks.closed
        if layer.window is not None:
            # Attention sink and recent window are attended to where that lies.
            table, first, end = np.ascontiguousarray(table[:, first:end]), 0, end - first
        which, positions, allowed = EVERYTHING, NOTHING_FORBIDDEN, NOTHING_FORBIDDEN
        if self.covering is not None and self.covering < end - first:
            which, positions, allowed = self._choice(layer, step, len(table), lse.shape[1], end - first)
        at, is_scored, largest = -1 if position is None else position, which == CHOSEN, self._takes_largest
        fetching = None
        if layer.pool is not None and layer.pool.reads_ahead():
            fetching = Fetching(layer.pool, table, first, end, which, positions, allowed)
            if isinstance(native, RetrievalStep):
                score = self.representative_type.score
                which = fetching.by_scores(q, self.shared, largest, score, self.threads)
        given = q, k, v, at, table, first, end, which, positions, allowed, self.shared
        estimated, taken = None, Taken(end - first if which == EVERYTHING else positions.shape[2])
        if isinstance(native, EstimatingStep):
            masses = np.empty((2, *lse.shape), np.float32)
            if beside is None:
                beside = np.full(lse.shape, -np.inf, np.float32)
            results = scale, softcap, beside, out, lse, masses
            with one_kernel_at_a_time:
                if fetching is not None:
                    fetching.by_rehearsal(native, (*given, *results))
                stored = native(*given, *results)
                # A fork has the same call, and may be asked in another thread.
                counted = native.taken.tolist()
            if which != EVERYTHING:
                lists = len(table) * positions.shape[1]
                attended, *others = [number / lists for number in counted]
                taken = Taken(attended / layer.layout.block_size if native.by_token else attended, *others)
            estimated = masses, taken
        else:
            with one_kernel_at_a_time:
                stored = native(*given, largest, scale, softcap, out, lse)
            if is_scored:
                taken = taken._replace(scored=allowed.shape[2] or end - first)
        assert layer.reading is not None
        layer.read = layer.read.plus(layer.reading.of_step(step.length, end - first, taken))
        if stored:
            layer.require_storable(stored)
        return estimated

    def _remember(self, layer: RetrievalLayer, step: Step, call: AttentionCall, q: np.ndarray, lse: np.ndarray) -> None:
        """Keep a query [batch, heads, k_dim] float32, and its log-sum-exp [batch, heads], for what keys receive."""
        layer.scale, layer.softcap = call.scale, call.softcap
        # In batches of a block's length, which costs a step little and holds few queries; without this one, of which a
        # device may still have to tell the log-sum-exp.
        if layer.unseen.count >= layer.layout.block_size:
            layer.accumulate_unseen(step.past)
        layer.unseen = layer.unseen.grown(q, lse)

    def _measure_recall(
        self, layer: RetrievalLayer, blocks: StepBlocks, call: AttentionCall, lse: torch.Tensor
    ) -> None:
        """Add the share of the full attention mass that this step covered, the mean over rows and heads.

        lse: of what it attended to, [batch, heads, 1] float32, or in another shape of as many numbers.
        """
        assert layer.pool is not None
        covered = covered_mass(layer.pool, blocks, call, lse, self.threads)
        layer.state = replace(layer.state, recall=layer.state.recall.plus(covered))

    def _count(self, layer: RetrievalLayer, attended: np.ndarray, total: np.ndarray, taken: Taken) -> None:
        """Add the share of the attention mass that a step covered by estimate, from log-sum-exps, and its blocks."""
        state = layer.state
        covered = covered_share(attended, total)
        # NaN: of none.
        share = state.share.plus(covered) if covered == covered else state.share
        blocks = state.blocks.plus(taken.attended) if self.targets else state.blocks
        layer.state = replace(state, share=share, blocks=blocks)

    def _choice(
        self, layer: RetrievalLayer, step: Step, rows: int, kv_heads: int, context: int
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """Which of the Context's blocks this step attends to: (which, positions, allowed) of `RetrievalStep`.

        Reused where the schedule says so, else chosen. KTransformers' pseudo code: the first layer of every
        `layer_step` layers selects, at every `token_step`-th token; all others take what was selected last, and the
        blocks that have left Local since. Where the first layers attend to everything, the next one selects.
        """
        settings = self.settings
        if settings.layer_step == settings.token_step == 1:
            return self._best(layer, rows, kv_heads, context)
        shared, layout, lists = step.cohort.shared, layer.layout, 1 if self.shared else kv_heads
        selections: SharedSelections = shared.setdefault(SELECTIONS, {})
        selected_at: SharedSelections = shared.setdefault(SELECTED_AT, {})
        key = (
            self.layer_idx // settings.layer_step, layout.block_size, layout.sink_blocks, layout.local_len, lists,
            # Where the number of blocks differs from list to list, only steps that know of it can take it over; blocks
            # whose single tokens are chosen are more.
            self.targets, settings.attend_to == "tokens",
        )  # fmt: skip
        decoded = step.past - step.cohort.prompt_length
        last = selections.get(key)
        # None behind a prompt, and where tokens were cropped.
        if last is not None:
            seen, when = selected_at[key][0]
            if when // settings.token_step == decoded // settings.token_step:
                return AS_GIVEN, with_entered(last, int(seen), context), NOTHING_FORBIDDEN
        which, positions, allowed = self._best(layer, rows, kv_heads, context)
        selections[key], selected_at[key] = positions, np.tile(np.array([context, decoded]), (rows, 1))
        return which, positions, allowed

    def _best(
        self, layer: RetrievalLayer, rows: int, kv_heads: int, context: int
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """The best blocks of the Context among those that preselection left; for single tokens, candidates."""
        assert self.budget is not None
        times = self.choice.candidates if self.choice is not None and self.choice.tokens else 1
        allowed, most = NOTHING_FORBIDDEN, min(self.budget * times, context)
        if layer.state.candidates is not None:
            candidates = layer.state.allowed(context)
            assert candidates is not None
            if candidates.shape[2] <= self.budget and not self.targets:
                return AS_GIVEN, candidates, NOTHING_FORBIDDEN
            allowed, most = candidates, min(most, candidates.shape[2])
        # Written by the call, which comes before anybody reads it.
        positions = np.empty((rows, 1 if self.shared else kv_heads, most), dtype=np.int32)
        return (CHOSEN if most else AS_GIVEN), positions, allowed
