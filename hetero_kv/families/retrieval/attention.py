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
from cpu_ops.chosen_blocks import attended_ids, best_blocks
from cpu_ops.scores import block_scores
from gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.adapter import bridge
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import Operator
from hetero_kv.engine.statistics import BLOCK_RECALL
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.retrieval import representatives
from hetero_kv.families.retrieval.block_scores import select_blocks
from hetero_kv.families.retrieval.footprint import PagedFootprint
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.prefill import RetrievalPrefill
from hetero_kv.families.retrieval.state import SELECTIONS, SharedSelections
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
        return RetrievalLayer(layout, storage.get(self.settings.kv_type), self.settings.representative_num)

    # -- decode

    def decode_step(self, layer: RetrievalLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if call.sliding_window is not None:
            self._refuse_window(call.sliding_window)
        blocks, pool = layer.store_token(step, call.k, call.v), layer.pool
        assert pool is not None
        if blocks.newly_closed[0] != blocks.newly_closed[1]:
            self._close_blocks(layer, step)
        batch, heads, _, k_dim = call.q.shape
        kv_heads = call.k.shape[1]
        q = call.q.reshape(batch, kv_heads, heads // kv_heads, k_dim).to("cpu", torch.float32).contiguous().numpy()
        ids = self.attended_blocks(layer, step, blocks, q, with_window=layer.window is None)
        partial, lse = self._over_blocks(pool, blocks, call, q, ids)
        out = torch.from_numpy(partial).view(batch, heads, 1, -1)
        if layer.window is not None or call.sink is not None or self.engine.measure_recall:
            out, lse = self._completed(layer, step, call, q, out, lse)
        if self.accumulates:
            layer.scale, layer.softcap = call.scale, call.softcap
            layer.unseen = layer.unseen.grown(q.reshape(batch, heads, k_dim), lse.reshape(batch, heads))
            # In batches of a block's length, which costs a step little and holds few queries.
            if layer.unseen.count >= layer.layout.block_size:
                layer.accumulate_unseen(step.length)
        return out.to(call.q.dtype)

    def _over_blocks(
        self, pool: BlockPool, blocks: StepBlocks, call: bridge.AttentionCall, q: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Attention over blocks `ids` [rows, lists, blocks]: out [rows, kv_heads, group, v_dim] and lse."""
        counts = np.full(ids.shape[:2], ids.shape[2], dtype=np.int32)
        arrays = q, pool.key_array, pool.value_array, ids, counts, blocks.lengths
        return attend_blocks(*arrays, call.scale, call.softcap or 0.0, threads=self.threads)

    def _completed(
        self,
        layer: RetrievalLayer,
        step: Step,
        call: bridge.AttentionCall,
        q: np.ndarray,
        out: torch.Tensor,
        lse: np.ndarray,
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Attention over the blocks, out [batch, heads, 1, v_dim] and lse, with the window's and the learned sink."""
        whole = torch.from_numpy(lse).view(out.shape[:3]).to(call.q.device)
        out = out.to(call.q.device)
        if layer.window is not None:
            out, whole = merge_attention(out, whole, *layer.window.attend(call.q, call.scale, call.softcap))
        if self.engine.measure_recall:
            self._measure_recall(layer, step, call, q, whole)
        if call.sink is not None:
            out, whole = apply_sink(out, whole, call.sink)
        return out, whole.cpu().numpy()

    def attended_blocks(
        self, layer: RetrievalLayer, step: Step, blocks: StepBlocks, q: np.ndarray, with_window: bool
    ) -> np.ndarray:
        """The blocks that this step attends to.

        Args:
            q: [rows, kv_heads, group, k_dim] float32.
            with_window: whether attention sink and recent window are among them, or attended to elsewhere.

        Returns ids [rows, lists, blocks] int32: one list per row when the kv heads choose together (or everything is
        attended to), else one per kv head.
        """
        end, table = blocks.closed, blocks.table
        first = min(layer.layout.sink_blocks, end)
        if self.budget is None or self.budget >= end - first:
            return table[:, None] if with_window else np.ascontiguousarray(table[:, None, first:end])
        if self.budget == 0:
            positions = np.empty((len(table), 1, 0), dtype=np.int32)
        else:
            positions = self._selection(layer, step, q, table[:, first:end])
        if with_window:
            return attended_ids(table, positions, first, end)
        return np.take_along_axis(table[:, None, first:end], positions, axis=2)

    def _selection(self, layer: RetrievalLayer, step: Step, q: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Positions in the Context [rows, lists, count] of this step: reused where the schedule says so, else chosen.

        KTransformers' pseudo code: the first layer of every `layer_step` layers selects, at every `token_step`-th
        token; all others take what was selected last.
        """
        settings = self.settings
        if settings.layer_step == settings.token_step == 1:
            return self._best(layer, q, context)
        selections: SharedSelections = step.cohort.shared.setdefault(SELECTIONS, {})
        key = (self.layer_idx // settings.layer_step, layer.layout.block_size, layer.layout.sink_blocks, self._lists(q))
        decoded = step.past - step.cohort.prompt_length
        due = decoded % settings.token_step == 0 and self.layer_idx % settings.layer_step == 0
        last = selections.get(key)
        # None where the group's first layer attends to everything, or tokens were cropped.
        if due or last is None:
            selections[key] = last = self._best(layer, q, context)
        return last

    def _lists(self, q: np.ndarray) -> int:
        return 1 if self.shared else q.shape[1]

    def _best(self, layer: RetrievalLayer, q: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Positions of the best blocks of `context` [rows, blocks] among those that preselection left."""
        pool = layer.pool
        assert pool is not None
        assert self.budget is not None
        allowed = None if layer.state.candidates is None else layer.state.allowed(context.shape[1])
        if allowed is not None and allowed.shape[2] <= self.budget:
            return allowed
        scores = block_scores(
            q,
            pool.representative_array,
            np.ascontiguousarray(context),
            np.full(len(context), context.shape[1], dtype=np.int32),
            self.representative_type.score,
            threads=self.threads,
        )
        if allowed is None:
            return best_blocks(scores, self.budget, self.shared, self.settings.group_reduce == "max")
        return select_blocks(scores, self.budget, self.shared, self.settings.group_reduce, allowed)

    def _measure_recall(
        self, layer: RetrievalLayer, step: Step, call: bridge.AttentionCall, q: np.ndarray, lse: torch.Tensor
    ) -> None:
        """Add the share of the full attention mass that this step covered, the mean over rows and heads."""
        blocks = step.blocks(layer.layout)
        assert layer.pool is not None
        _, full = self._over_blocks(layer.pool, blocks, call, q, np.ascontiguousarray(blocks.table[:, None]))
        covered = torch.exp(lse.cpu().flatten() - torch.from_numpy(full).flatten())
        state = layer.state
        layer.state = replace(
            state, recall_sum=state.recall_sum + float(covered.mean()), recall_steps=state.recall_steps + 1
        )

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile what decoding and short turns need, or load it from Numba's cache, before a token waits for it."""
        kind, settings = storage.get(self.settings.kv_type), self.settings
        pool = BlockPool(1, kv_heads, settings.block_size, k_dim, v_dim, kind, settings.representative_num)
        q, one = np.zeros((1, kv_heads, group, k_dim), np.float32), np.ones((1, 1), np.int32)
        ids = np.zeros((1, 1, 1), np.int32)
        attend_blocks(q, pool.key_array, pool.value_array, ids, one, one[0] * 0, 1.0, softcap)
        attend_blocks_causal(q[:, None], pool.key_array, pool.value_array, ids, one, one[0], 1.0, softcap)
        block_scores(q, pool.representative_array, ids[0], one[0], self.representative_type.score)

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
