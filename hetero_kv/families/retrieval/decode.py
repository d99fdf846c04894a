"""The decode half of retrieval attention: chooses a token's blocks and calls the kernel that attends to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops.chosen_blocks import LARGEST
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.cpu_ops.retrieval_step import BY_MEAN_SCORE, RetrievalStep, StepEstimates, StepPool
from hetero_kv.cpu_ops.step_contract import AS_GIVEN, CHOSEN, EVERYTHING, NOTHING_FORBIDDEN
from hetero_kv.cpu_ops.threads import one_kernel_at_a_time
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.retrieval.block_read_ahead import BlockReadAhead
from hetero_kv.families.retrieval.decoded_rows import DecodedRows, GroupRows
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.prefill import RetrievalPrefill
from hetero_kv.families.retrieval.read_bytes import ReadSizes
from hetero_kv.families.retrieval.recall import covered_mass
from hetero_kv.families.retrieval.recording import add_blocks, add_window, around_context, chosen_of_context
from hetero_kv.families.retrieval.state import SELECTED_AT, SELECTIONS, SharedSelections, with_entered
from hetero_kv.families.retrieval.step_counts import StepCounts
from hetero_kv.store.pool import BlockPool
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES


class RetrievalDecode(RetrievalPrefill):
    """How `RetrievalAttention` decodes a token over blocks in DRAM."""

    @property
    def _takes_largest(self) -> bool:
        """Whether a kv head's score is the largest of its group's, rather than their mean."""
        return self.settings.group_reduce == "max"

    def _bound_step(
        self, pool: BlockPool, lengths: np.ndarray, group: int, softcapped: bool, dtype: torch.dtype, shares: bool
    ) -> RetrievalStep:
        """The native call of a layer with this pool and `lengths` tokens per row, for queries of `dtype`.

        shares: as `shares_readings`.
        """
        kind, choice = self.representative_type, self.choice
        if choice is None:
            choice = BY_MEAN_SCORE._replace(reduce=LARGEST) if self._takes_largest else BY_MEAN_SCORE
        arrays = StepPool(
            pool.key_array, pool.value_array, pool.representative_array, lengths, pool.offset_array,
            pool.value_mean_array, pool.key_code_array, pool.group_array, pool.group_value_array,
        )  # fmt: skip
        # Without a budget all blocks are attended to, and the score is never used.
        score = "dot" if self.budget is None else kind.score
        has_mean = self.choice is not None and kind.has_mean
        number = ARRAY_DTYPES.get(dtype, np.float32)
        return RetrievalStep(
            arrays, group, score, softcapped, number, self.threads, choice, has_mean, shares and self.decodes_drafts
        )

    def _native_of(
        self, layer: RetrievalLayer, blocks: StepBlocks, call: AttentionCall, dtype: torch.dtype
    ) -> RetrievalStep:
        """The layer's native call; binds a new one if the present one does not fit."""
        native, softcapped = layer.token_step, call.softcap is not None
        if native is None or native.bound_to != (ARRAY_DTYPES[dtype], softcapped):
            assert layer.pool is not None
            group = call.q.shape[1] // call.k.shape[1]
            native = self._bound_step(layer.pool, blocks.lengths, group, softcapped, dtype, self.shares_readings)
            layer.token_step, layer.reading = native, ReadSizes.of(layer.pool, layer.window)
        return native

    @property
    def _has_schedule(self) -> bool:
        """Whether several layers or tokens share a choice of blocks."""
        return self.settings.layer_step * self.settings.token_step > 1

    def _chooses(self, context: int) -> bool:
        """Whether a token chooses among a Context of so many blocks, instead of attending to all of it."""
        return self.covering is not None and self.covering < context

    def _attend_natively(
        self, native: RetrievalStep, groups: list[GroupRows], q: np.ndarray, k: np.ndarray,
        v: np.ndarray, scale: float, softcap: float, out: np.ndarray, lse: np.ndarray,
        outside_lse: np.ndarray | None = None, queue: KernelQueue | None = None, given: np.ndarray | None = None,
    ) -> StepCounts:  # fmt: skip
        """Store the tokens of the groups' rows, unless they are; then choose their blocks and attend to them.

        outside_lse: the log-sum-exp of attention computed elsewhere, in the shape of `lse`. queue: of the kernels that
        compute q, k and v, to which the call is added; None: these are computed, and the call is made now. given:
        positions that a device has chosen. Returns the counts, for `RetrievalLayer.count_step` of each group.
        """
        # Of a Context with a list only that is attended to, however short it is.
        table, ranges, decoded = DecodedRows.of(groups, self.covering if given is None else 0)
        layer, kv_heads, chooses, contexts = groups[0].layer, lse.shape[1], any(decoded.chosen), decoded.contexts
        which, positions, allowed = EVERYTHING, NOTHING_FORBIDDEN, NOTHING_FORBIDDEN
        if given is not None:
            which, positions = AS_GIVEN, given
        elif chooses:
            if queue is not None and self._has_schedule:
                # An earlier layer's choice may apply to this one.
                queue.run()
            # Several groups choose together only where all of them choose as one does.
            index = contexts.index(max(contexts))
            which, positions, allowed = self._choice(
                groups[index].layer, groups[index].step, len(table), kv_heads, contexts[index]
            )
        estimates = None
        if native.estimates:
            tokens = NOTHING_FORBIDDEN
            if layer.record is not None and native.by_token and chooses:
                capacity = positions.shape[2] * layer.layout.block_size
                tokens = np.full((*positions.shape[:2], capacity), -1, np.int32)
            estimates = StepEstimates.of(lse, outside_lse, tokens)
        inputs: tuple[Any, ...] = q, k, v, ranges, table
        others: tuple[Any, ...] = positions, allowed, self.shared, scale, softcap, out, lse, estimates
        # Blocks of several groups are read ahead by each of them, in a call of its own.
        if len(groups) == 1 and layer.pool is not None and layer.pool.reads_ahead():
            if queue is not None:
                queue.run()
            first, end = ranges[1:, 0].tolist()
            fetching = BlockReadAhead(layer.pool, table, first, end, which, positions)
            which = fetching.request(native, (*inputs, which, *others))
        arguments: tuple[Any, ...] = *inputs, which, *others
        if queue is not None:
            native.add_to(queue, layer.require_storable, *arguments)
        else:
            with one_kernel_at_a_time:
                stored = native(*arguments)
            if stored:
                layer.require_storable(stored)
        if layer.record is not None:
            ids = groups[0].blocks.table[0, groups[0].blocks.finalized - contexts[0] : groups[0].blocks.finalized]
            size, none = layer.layout.block_size, np.empty((0, 0), np.int32)
            recorded = NOTHING_FORBIDDEN if estimates is None else estimates.recorded
            chosen_by = (each[0] if len(each) else none for each in (positions, recorded))
            layer.chosen = chosen_of_context(ids, size, which, *chosen_by)
        taken, masses = (None, None) if estimates is None else (estimates.taken, estimates.masses)
        unit = layer.layout.block_size if native.by_token else 1
        most, lists = positions.shape[2], positions.shape[1]
        return StepCounts(decoded, which, most, lists, allowed.shape[2], unit, taken, masses, self.targets)

    def _record_token(
        self, layer: RetrievalLayer, blocks: StepBlocks, call: AttentionCall, total: torch.Tensor,
        attended: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Complete the layer's record after a decoded token.

        total, attended: as of `AttentionRecord.complete`.
        """
        assert layer.record is not None
        assert layer.chosen is not None
        add_blocks(layer, blocks, call, around_context(layer, blocks, layer.chosen))
        add_window(layer, call)
        layer.record.complete(total, attended, call.sink)
        layer.chosen = None

    def _measure_recall(
        self, layer: RetrievalLayer, blocks: StepBlocks, call: AttentionCall, lse: torch.Tensor
    ) -> None:
        """Record the share of the full attention mass that this step covered, the mean over rows and heads.

        lse: of the attended tokens, [batch, heads, 1] float32, or another shape with as many numbers.
        """
        assert layer.pool is not None
        covered = covered_mass(layer.pool, blocks, call, lse, self.threads)
        layer.state = replace(layer.state, recall=layer.state.recall.plus(covered))

    def _choice(
        self, layer: RetrievalLayer, step: Step, rows: int, kv_heads: int, context: int
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """Choose the Context blocks that this step attends to: (which, positions, allowed) of `RetrievalStep`.

        Reuses an earlier selection where the schedule says so. KTransformers' pseudo code: the first layer of every
        `layer_step` layers selects, at every `token_step`-th token; all others reuse the latest selection and add the
        blocks that have left Local since. If the first layers are dense, the next one selects.
        """
        settings = self.settings
        if not self._has_schedule:
            return self._best(layer, rows, kv_heads, context)
        shared, layout, lists = step.group.shared, layer.layout, 1 if self.shared else kv_heads
        selections: SharedSelections = shared.setdefault(SELECTIONS, {})
        selected_at: SharedSelections = shared.setdefault(SELECTED_AT, {})
        key = (
            self.layer_idx // settings.layer_step, layout.block_size, layout.sink_blocks, layout.local_len, lists,
            # A selection with target_mass has lists of different lengths, and one for single tokens has more blocks:
            # only layers with the same settings can reuse it.
            self.targets, settings.attend_to == "tokens",
        )  # fmt: skip
        decoded = step.past - step.group.prompt_length
        last = selections.get(key)
        # There is no selection right after a prompt or a crop.
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
        """The best Context blocks among the preselected ones; for single tokens, the blocks they are chosen from."""
        assert self.budget is not None
        times = self.choice.candidates if self.choice is not None and self.choice.tokens else 1
        allowed, most = NOTHING_FORBIDDEN, min(self.budget * times, context)
        if layer.state.candidates is not None:
            candidates = layer.state.allowed(context)
            assert candidates is not None
            if candidates.shape[2] <= self.budget and not self.targets:
                return AS_GIVEN, candidates, NOTHING_FORBIDDEN
            allowed, most = candidates, min(most, candidates.shape[2])
        # The native call fills it before anything reads it.
        positions = np.empty((rows, 1 if self.shared else kv_heads, most), dtype=np.int32)
        return (CHOSEN if most else AS_GIVEN), positions, allowed
