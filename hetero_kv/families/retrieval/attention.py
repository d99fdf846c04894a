"""Retrieval attention: everything kept in DRAM, the best blocks attended to on the CPU, where they lie.

KTransformers' sparse-attention framework: a sequence is Initial | Context | Local; Initial and Local are attended
in full, the Context through the blocks whose representatives score best against the query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from cpu_ops.attention import attend_blocks
from cpu_ops.chosen_blocks import attended_ids, best_blocks
from cpu_ops.scores import block_scores
from gpu_ops.attention import chunk_attention
from gpu_ops.column_sums import column_sums
from gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.adapter import bridge
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator, Operator
from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.recorded_prompt import RecordedPrompt
from hetero_kv.engine.statistics import BLOCK_RECALL
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.families.retrieval import representatives
from hetero_kv.families.retrieval.block_scores import select_blocks
from hetero_kv.families.retrieval.budgets import layer_budget
from hetero_kv.families.retrieval.footprint import PagedFootprint
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.preselection import block_votes, preselect
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.retrieval.state import SharedSelections
from hetero_kv.families.retrieval.unseen import NONE_UNSEEN
from hetero_kv.families.window.attention import SlidingWindowAttention
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool

# Blocks whose representatives are computed at once: bounds the float32 copy of their keys.
_CLOSED_AT_ONCE = 64
# What a cohort's layers share: selections that they hand to each other.
_SELECTIONS = "retrieval selections"


class RetrievalAttention(AttentionOperator):
    """Prefills exactly, chunk by chunk; decodes over Initial, Local and the best `second_block_count` blocks.

    With a budget that covers the Context the result is full attention, to the storage type's precision.
    """

    meaning = "keeps everything in DRAM blocks, attends to the blocks that the query retrieves"
    settings_class = RetrievalSettings
    prefills_exactly = True
    continues_exactly = True
    statistics = (BLOCK_RECALL,)

    settings: RetrievalSettings

    def __init__(self, path: str, wrapped: nn.Module, settings: RetrievalSettings, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.representative_type = representatives.get(settings.representative_type)
        self.threads = min(engine.resolved_threads(), numba.config.NUMBA_NUM_THREADS)
        self.shared = settings.head_select_mode == "SHARED"
        layers = self._own_config.num_hidden_layers
        self.budget = layer_budget("second_block_count", settings.second_block_count, self.layer_idx, layers)
        if self.layer_idx < settings.dense_layer_num:
            self.budget = None
        preselected = layer_budget("preselect_block_count", settings.preselect_block_count, self.layer_idx, layers)
        self.preselected = preselected if settings.preselect_block and self.budget is not None else None
        self.accumulates = self.representative_type.needs_attention and self.budget is not None

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """A layer with a sliding window of the model's own keeps that: retrieval never applies to it."""
        if hasattr(module, "config") and hasattr(module, "layer_idx") and bridge.layer_window(module) is not None:
            return SlidingWindowAttention
        return cls

    def new_cache_layer(self) -> RetrievalLayer:
        layout = RetrievalLayout.of_settings(self.settings, closes_alone=self.accumulates)
        return RetrievalLayer(layout, storage.get(self.settings.kv_type), self.settings.representative_num)

    # -- prefill

    def prefill_chunk(self, layer: RetrievalLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if call.sliding_window is not None:
            self._refuse_window(call.sliding_window)
        if layer.prefill_buffer is None:
            self._accumulate_unseen(layer, step.past)
            if step.part.is_first:
                layer.state = replace(layer.state, observation=self._new_observation())
        past_k, past_v = layer.extend(call.k, call.v)
        out, lse = chunk_attention(call.q, past_k, past_v, call.k, call.v, call.scale, call.softcap)
        if call.sink is not None:
            out, lse = apply_sink(out, lse, call.sink)
        if layer.state.observation is not None:
            layer.state.observation.watch(call.q, lse, call.scale, call.softcap)
        return out

    def load_prefill(self, layer: RetrievalLayer, step: Step, recorded: RecordedPrompt) -> None:
        observation = self._new_observation()
        if observation is not None:
            recorded.show_last_queries(observation)
        layer.state = replace(layer.state, observation=observation)
        buffer = PrefillBuffer(recorded.keys, recorded.values, past=0, length=recorded.length)
        layer.store(step, recorded.keys, recorded.values, buffer)
        self.end_of_prompt(layer, step, buffer)

    def _new_observation(self) -> Observation | None:
        watched = self.accumulates or self.preselected is not None
        return Observation(self.settings.observation_len) if watched else None

    def _refuse_window(self, window: int) -> None:
        raise UnsupportedModelError(
            f"{self.path}: the model asks for a sliding window of {window}; use SlidingWindowAttention there"
        )

    def end_prefill(self, layer: RetrievalLayer, step: Step) -> None:
        buffer = layer.end_prefill(step)
        if buffer is not None:
            self.end_of_prompt(layer, step, buffer)

    def end_of_prompt(self, layer: RetrievalLayer, step: Step, buffer: PrefillBuffer) -> None:
        """What follows when a layer has stored a prompt: votes of its last queries, representatives of new blocks.

        A prompt that passes in parts has all of that at its end, so that it is as if it had come as a whole, up to the
        precision of `kv_type`, in which later parts see the earlier.
        """
        if step.part.is_last:
            self._preselect(layer, step, buffer)
            self._close_blocks(layer, step)

    def _preselect(self, layer: RetrievalLayer, step: Step, buffer: PrefillBuffer) -> None:
        """Take what the prompt's last queries looked at: preselect, and accumulate it for representatives."""
        step.cohort.shared.pop(_SELECTIONS, None)
        observation = layer.state.observation
        layer.state = replace(layer.state, candidates=None, observation=None)
        if observation is None:
            return
        received = observation.accumulated_attention(buffer.keys[:, :, : buffer.length]).cpu()
        layout = layer.layout
        first, blocks = layout.sink_blocks, layout.context_blocks(step.length)
        if self.preselected is not None and blocks > self.preselected:
            votes = block_votes(received, first, first + blocks, layout.block_size, self.settings.kernel_size)
            candidates = preselect(votes, self.preselected, self.shared)
            layer.state = replace(layer.state, candidates=candidates, preselected_end=blocks)
        if self.accumulates:
            layer.accumulate(received, start=0)

    def _close_blocks(self, layer: RetrievalLayer, step: Step) -> None:
        """Compute the representatives of blocks that enter the Context."""
        blocks, pool = step.blocks(layer.layout), layer.pool
        start, end = max(blocks.newly_closed[0], layer.layout.sink_blocks), blocks.newly_closed[1]
        if self.budget is None or start >= end:
            return
        assert pool is not None
        self._accumulate_unseen(layer, step.past)
        accumulated = layer.take_accumulated(start, end) if self.accumulates else None
        for first in range(start, end, _CLOSED_AT_ONCE):
            part = slice(first, min(first + _CLOSED_AT_ONCE, end))
            for row, table in enumerate(blocks.table):
                ids = torch.from_numpy(table[part].astype(np.int64))
                received = None if accumulated is None else accumulated[row, first - start : part.stop - start]
                keys = pool.storage.decode(pool.keys[ids]).float()
                vectors = self.representative_type.compute(keys, layer.representative_num, received)
                pool.representatives[ids] = vectors.to(pool.representatives.dtype)

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
                self._accumulate_unseen(layer, step.length)
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
        selections: SharedSelections = step.cohort.shared.setdefault(_SELECTIONS, {})
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

    def _accumulate_unseen(self, layer: RetrievalLayer, length: int) -> None:
        """Add the attention of queries decoded so far to the generated tokens, by which they are represented.

        `length` is the number of tokens that the last of these queries saw.
        """
        if not layer.unseen.count:
            return
        q, lse = (torch.from_numpy(part) for part in layer.unseen.stacked())
        layer.unseen = NONE_UNSEEN
        cohort, layout, pool = layer.cohort, layer.layout, layer.pool
        assert pool is not None
        start = max(cohort.closed[layout], cohort.prompt_length // layout.block_size) * layout.block_size
        keys = torch.stack([pool.read(layer.block_ids(row), start, length)[0] for row in range(len(q))])
        layer.accumulate(column_sums(q, lse, keys, layer.scale, layer.softcap).sum(dim=2), start)

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
        """Compile what decoding needs, or load it from Numba's cache, before the first token waits for it."""
        kind, settings = storage.get(self.settings.kv_type), self.settings
        pool = BlockPool(1, kv_heads, settings.block_size, k_dim, v_dim, kind, settings.representative_num)
        q, one = np.zeros((1, kv_heads, group, k_dim), np.float32), np.ones((1, 1), np.int32)
        ids = np.zeros((1, 1, 1), np.int32)
        attend_blocks(q, pool.key_array, pool.value_array, ids, one, one[0] * 0, 1.0, softcap)
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

    @property
    def observed_queries(self) -> int:
        return self.settings.observation_len
