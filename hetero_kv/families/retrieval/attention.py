"""Retrieval attention: everything kept in DRAM, the best blocks attended to on the CPU, where they lie.

KTransformers' sparse-attention framework: a sequence is Initial | Context | Local; Initial and Local are attended
in full, the Context through the blocks whose representatives score best against the query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from cpu_ops.attention import attend_blocks
from cpu_ops.causal_attention import attend_blocks_causal
from cpu_ops.retrieval_step import AS_GIVEN, CHOSEN, EVERYTHING, NOTHING_FORBIDDEN, RetrievalStep
from cpu_ops.threads import one_kernel_at_a_time
from gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.adapter import bridge
from hetero_kv.adapter.kernel_arrays import ARRAY_DTYPES, kernel_array
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import Operator
from hetero_kv.adapter.token_arrays import TokenArrays
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.statistics import BLOCK_RECALL
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.retrieval import representatives
from hetero_kv.families.retrieval.footprint import PagedFootprint
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.prefill import RetrievalPrefill
from hetero_kv.families.retrieval.state import SELECTED_AT, SELECTIONS, SharedSelections, with_entered
from hetero_kv.families.window.attention import SlidingWindowAttention
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool


class RetrievalAttention(RetrievalPrefill):
    """Prefills exactly, chunk by chunk; decodes over Initial, Local and the best `second_block_count` blocks.

    With a budget that covers the Context the result is full attention, to the storage type's precision.
    """

    meaning = "keeps everything in DRAM blocks, attends to the blocks that the query retrieves"
    statistics = (BLOCK_RECALL,)

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """A layer with a sliding window of the model's own keeps that: retrieval never applies to it."""
        if hasattr(module, "config") and hasattr(module, "layer_idx") and bridge.layer_window(module) is not None:
            return SlidingWindowAttention
        return cls

    def new_cache_layer(self) -> RetrievalLayer:
        layout = RetrievalLayout.of_settings(self.settings, closes_alone=self.accumulates)
        return RetrievalLayer(layout, storage.get(self.settings.kv_type), self.settings.stored_representatives)

    # -- decode

    def decode_step(self, layer: RetrievalLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if call.sliding_window is not None:
            self._refuse_window(call.sliding_window)
        blocks = layer.blocks_for(step, call.k, call.v)
        is_completed = layer.window is not None or call.sink is not None
        dtype = torch.bfloat16 if call.q.dtype is torch.bfloat16 and not is_completed else torch.float32
        native = layer.token_step
        if native is None or not native.fits(ARRAY_DTYPES[dtype], call.softcap is not None):
            native = layer.token_step = self._token_step(layer, call, blocks, dtype)
        closes = blocks.newly_closed[0] != blocks.newly_closed[1]
        is_stored = closes or not native.stores or layer.window is not None
        if is_stored:
            layer.store_token(step, call.k, call.v)
        if closes:
            self._close_blocks(layer, step)
        rows, heads = call.q.shape[:2]
        out = torch.empty((rows, heads, 1, native.v_dim), dtype=dtype)
        lse = np.empty((rows, heads // native.group, native.group), np.float32)
        q = kernel_array(call.q, dtype)
        k, v = (q, q) if is_stored else (kernel_array(call.k, dtype), kernel_array(call.v, dtype))
        position = None if is_stored else step.past
        scale, softcap, array = call.scale, call.softcap or 0.0, kernel_array(out, dtype)
        self._attend_natively(native, layer, step, blocks, q, k, v, position, scale, softcap, array, lse)
        if is_completed or self.engine.measure_recall:
            out, lse = self._completed(layer, blocks, call, out, lse)
        if self.accumulates:
            layer.scale, layer.softcap = call.scale, call.softcap
            seen = call.q.squeeze(2).to("cpu", torch.float32).contiguous().numpy()
            layer.unseen = layer.unseen.grown(seen, lse.reshape(rows, heads))
            # In batches of a block's length, which costs a step little and holds few queries.
            if layer.unseen.count >= layer.layout.block_size:
                layer.accumulate_unseen(step.length)
        return out if out.dtype is call.q.dtype else out.to(call.q.dtype)

    def _token_step(
        self, layer: RetrievalLayer, call: bridge.AttentionCall, blocks: StepBlocks, dtype: torch.dtype
    ) -> RetrievalStep:
        pool = layer.pool
        assert pool is not None
        return RetrievalStep(
            pool.key_array, pool.value_array, pool.representative_array, blocks.lengths,
            call.q.shape[1] // call.k.shape[1], self.representative_type.score, call.softcap is not None,
            ARRAY_DTYPES[dtype], self.threads,
        )  # fmt: skip

    def prepare_arrays(self, cache: HeteroCache, dtype: Any, softcap: float | None) -> Any:
        if len(cache.steps) != 1 or self.accumulates or self.engine.measure_recall:
            return None
        step = cache.steps[0]
        layer = step.cohort.layers[self.layer_idx]
        native = layer.token_step
        if native is None or not native.stores or not native.fits(dtype, softcap is not None):
            return None
        blocks = step.made.get(id(layer.layout)) or step.blocks(layer.layout)
        if layer.window is not None or blocks.newly_closed[0] != blocks.newly_closed[1]:
            return None
        return native, layer, step, blocks

    def attend_arrays(self, prepared: Any, arrays: TokenArrays, scale: float, softcap: float) -> None:
        native, layer, step, blocks = prepared
        q, k, v = arrays.q, arrays.k, arrays.v
        lse = np.empty((len(q), k.shape[1], native.group), np.float32)
        self._attend_natively(
            native, layer, step, blocks, q, k, v, step.past, scale, softcap, arrays.attended, lse
        )  # fmt: skip

    def _attend_natively(
        self, native: RetrievalStep, layer: RetrievalLayer, step: Step, blocks: StepBlocks, q: np.ndarray,
        k: np.ndarray, v: np.ndarray, position: int | None, scale: float, softcap: float, out: np.ndarray,
        lse: np.ndarray,
    ) -> None:  # fmt: skip
        """Have the token stored, unless `position` is None, its blocks chosen and attended to."""
        table, first, end = blocks.table, min(layer.layout.sink_blocks, blocks.closed), blocks.closed
        if layer.window is not None:
            # Attention sink and recent window are attended to where that lies.
            table, first, end = np.ascontiguousarray(table[:, first:end]), 0, end - first
        which, positions, allowed = EVERYTHING, NOTHING_FORBIDDEN, NOTHING_FORBIDDEN
        if self.budget is not None and self.budget < end - first:
            which, positions, allowed = self._choice(layer, step, len(table), lse.shape[1], end - first)
        largest_score = self.settings.group_reduce == "max"
        with one_kernel_at_a_time:
            largest = native(
                q, k, v, -1 if position is None else position, table, first, end, which, positions, allowed,
                self.shared, largest_score, scale, softcap, out, lse,
            )  # fmt: skip
        if largest:
            layer.require_storable(largest)

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
        key = (self.layer_idx // settings.layer_step, layout.block_size, layout.sink_blocks, layout.local_len, lists)
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
        """The best blocks of the Context, among those that preselection left."""
        assert self.budget is not None
        allowed = NOTHING_FORBIDDEN
        if layer.state.candidates is not None:
            candidates = layer.state.allowed(context)
            assert candidates is not None
            if candidates.shape[2] <= self.budget:
                return AS_GIVEN, candidates, NOTHING_FORBIDDEN
            allowed = candidates
        # Written by the call, which comes before anybody reads it.
        positions = np.empty((rows, 1 if self.shared else kv_heads, self.budget), dtype=np.int32)
        return (CHOSEN if self.budget else AS_GIVEN), positions, allowed

    def _completed(
        self, layer: RetrievalLayer, blocks: StepBlocks, call: bridge.AttentionCall, out: torch.Tensor, lse: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Attention over the blocks, out [batch, heads, 1, v_dim] and lse, with the window's and the learned sink."""
        device = call.q.device
        out, whole = out.to(device), torch.from_numpy(lse).view(out.shape[:3]).to(device)
        if layer.window is not None:
            out, whole = merge_attention(out, whole, *layer.window.attend(call.q, call.scale, call.softcap))
        if self.engine.measure_recall:
            self._measure_recall(layer, blocks, call, whole)
        if call.sink is not None:
            out, whole = apply_sink(out, whole, call.sink)
        return out, whole.cpu().numpy()

    def _measure_recall(
        self, layer: RetrievalLayer, blocks: StepBlocks, call: bridge.AttentionCall, lse: torch.Tensor
    ) -> None:
        """Add the share of the full attention mass that this step covered, the mean over rows and heads."""
        pool = layer.pool
        assert pool is not None
        by_kv_head = call.q.squeeze(2).unflatten(1, (pool.keys.shape[1], -1))
        q = by_kv_head.to("cpu", torch.float32).contiguous().numpy()
        ids = np.ascontiguousarray(blocks.table[:, None])
        counts = np.full(ids.shape[:2], ids.shape[2], dtype=np.int32)
        arrays = q, pool.key_array, pool.value_array, ids, counts, blocks.lengths
        _, full = attend_blocks(*arrays, call.scale, call.softcap or 0.0, threads=self.threads)
        covered = float(torch.exp(lse.cpu().flatten() - torch.from_numpy(full).flatten()).mean())
        state = layer.state
        layer.state = replace(state, recall_sum=state.recall_sum + covered, recall_steps=state.recall_steps + 1)

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile what decoding and short turns need, or load it from Numba's cache, before a token waits for it."""
        kind, settings = storage.get(self.settings.kv_type), self.settings
        pool = BlockPool(1, kv_heads, settings.block_size, k_dim, v_dim, kind, settings.stored_representatives)
        q, one = np.zeros((1, kv_heads, group, k_dim), np.float32), np.ones((1, 1), np.int32)
        ids = np.zeros((1, 1, 1), np.int32)
        attend_blocks_causal(q[:, None], pool.key_array, pool.value_array, ids, one, one[0], 1.0, softcap)
        arrays = pool.key_array, pool.value_array, pool.representative_array, one[0]
        dtype = ARRAY_DTYPES.get(self._own_config.dtype, np.float32)
        RetrievalStep(*arrays, group, self.representative_type.score, softcap > 0, dtype, self.threads)

    # -- what others ask

    @classmethod
    def registries(cls) -> Mapping[str, Mapping[str, str]]:
        known = {name: representatives.get(name).meaning for name in representatives.names()}
        return {"Representatives of a block (representative_type)": known}

    def settings_in_layer(self) -> dict[str, Any]:
        own: dict[str, Any] = {"second_block_count": "all" if self.budget is None else self.budget}
        if self.preselected is not None:
            own["preselect_block_count"] = self.preselected
        return super().settings_in_layer() | own

    def footprint(self, shape: KVShape) -> PagedFootprint:
        return PagedFootprint.of(shape, self.settings, self.accumulates)

    def attended_tokens(self, length: int) -> float:
        return RetrievalLayout.of_settings(self.settings).attended_tokens(length, self.budget)
