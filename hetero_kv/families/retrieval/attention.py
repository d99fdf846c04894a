"""Retrieval attention: everything kept in DRAM, the best blocks attended to on the CPU, where they lie.

KTransformers' sparse-attention framework: a sequence is Initial | Context | Local; Initial and Local are attended
in full, the Context through the blocks whose representatives score best against the query.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from cpu_ops.attention import attend_blocks
from cpu_ops.scores import block_scores
from gpu_ops.attention import chunk_attention
from gpu_ops.column_sums import column_sums
from gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.adapter import bridge
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator, Operator
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.statistics import BLOCK_RECALL
from hetero_kv.evals.recorded_layer import RecordedLayer
from hetero_kv.families.retrieval import representatives
from hetero_kv.families.retrieval.block_scores import select_blocks
from hetero_kv.families.retrieval.budgets import layer_budget
from hetero_kv.families.retrieval.footprint import PagedFootprint
from hetero_kv.families.retrieval.layer import PagedLayer, PrefillBuffer
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.partition import attended_tokens
from hetero_kv.families.retrieval.preselection import block_votes, preselect
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.retrieval.state import RetrievalState, SharedSelections
from hetero_kv.families.window.attention import SlidingWindowAttention
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool

# Blocks whose representatives are computed at once: bounds the float32 copy of their keys.
_INDEXED_AT_ONCE = 64


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
        self.keeps_received = self.representative_type.needs_attention and self.budget is not None

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """A layer with a sliding window of the model's own keeps that: retrieval never applies to it."""
        if hasattr(module, "config") and hasattr(module, "layer_idx") and bridge.layer_window(module) is not None:
            return SlidingWindowAttention
        return cls

    def new_cache_layer(self, capacity: int, shared: SharedSelections) -> PagedLayer:
        """See AttentionOperator."""
        settings = self.settings
        return PagedLayer(
            capacity,
            settings.block_size,
            settings.initial_len,
            settings.local_windows_len,
            storage.get(settings.kv_type),
            settings.representative_num,
            on_stored=self.stored,
            keep_received=self.keeps_received,
            state=RetrievalState(shared),
        )

    # -- prefill

    def prefill_chunk(self, layer: PagedLayer, call: bridge.AttentionCall) -> torch.Tensor:
        """See AttentionOperator."""
        self._require_full(call)
        if layer.prefill_buffer is None:
            self._add_unseen(layer, layer.get_seq_length())
            if layer.part.is_first:
                layer.state.observation = self._new_observation()
        past_k, past_v = layer.extend(call.k, call.v)
        out, lse = chunk_attention(call.q, past_k, past_v, call.k, call.v, call.scale, call.softcap)
        if call.sink is not None:
            out, lse = apply_sink(out, lse, call.sink)
        if layer.state.observation is not None:
            layer.state.observation.watch(call.q, lse, call.scale, call.softcap)
        return out

    def take_over(self, cache: HeteroCache, recorded: RecordedLayer) -> None:
        """See AttentionOperator."""
        layer: PagedLayer = cache.layers[self.layer_idx]
        layer.state.observation = self._new_observation()
        if layer.state.observation is not None:
            recorded.show_last_queries(layer.state.observation)
        buffer = PrefillBuffer(recorded.keys, recorded.values, past=0, length=recorded.length)
        layer.append(recorded.keys, recorded.values, buffer)

    def _new_observation(self) -> Observation | None:
        watched = self.keeps_received or self.preselected is not None
        return Observation(self.settings.observation_len) if watched else None

    def _require_full(self, call: bridge.AttentionCall) -> None:
        if call.sliding_window is not None:
            raise bridge.UnsupportedModelError(
                f"{self.path}: the model asks for a sliding window of {call.sliding_window}; "
                "use SlidingWindowAttention there"
            )

    def stored(self, layer: PagedLayer, buffer: PrefillBuffer | None) -> None:
        """What follows when a layer has stored tokens: votes of a prompt's end, representatives of new blocks.

        A prompt that passes in parts has all of that at its end, so that it is as if it had come as a whole, up to the
        precision of `kv_type`, in which later parts see the earlier.
        """
        if not layer.part.is_last:
            return
        if buffer is not None:
            self._observe(layer, buffer)
        self._index_context(layer)

    def _observe(self, layer: PagedLayer, buffer: PrefillBuffer) -> None:
        """Take what the prompt's last queries looked at: preselect, and remember it for representatives."""
        state: RetrievalState = layer.state
        state.prompt_length, state.decoded, state.candidates = buffer.length, 0, None
        state.shared.clear()
        if state.observation is None:
            return
        received = state.observation.received(buffer.keys[:, :, : buffer.length]).cpu()
        state.observation = None
        first, blocks = layer.initial_blocks, layer.context_blocks
        if self.preselected is not None and blocks > self.preselected:
            votes = block_votes(received, first, first + blocks, layer.block_size, self.settings.kernel_size)
            state.candidates = preselect(votes, self.preselected, self.shared)
            state.preselected_end = blocks
        if layer.pool is not None and layer.pool.received is not None:
            layer.add_received(received, start=0)

    def _index_context(self, layer: PagedLayer) -> None:
        """Compute the representatives of blocks that have entered the Context."""
        pool, end = layer.pool, layer.context_end
        assert pool is not None
        start = max(layer.indexed_blocks, layer.initial_blocks)
        if self.budget is None or start >= end:
            return
        self._add_unseen(layer, layer.get_seq_length() - 1)
        for first in range(start, end, _INDEXED_AT_ONCE):
            for row in layer.rows:
                ids = torch.from_numpy(row.ids[first : min(first + _INDEXED_AT_ONCE, end)].astype(np.int64))
                received = None if pool.received is None else pool.received[ids]
                keys = pool.storage.decode(pool.keys[ids]).float()
                vectors = self.representative_type.compute(keys, layer.representative_num, received)
                pool.representatives[ids] = vectors.to(pool.representatives.dtype)
        layer.indexed_blocks = max(layer.indexed_blocks, end)

    # -- decode

    def decode_step(self, layer: PagedLayer, call: bridge.AttentionCall) -> torch.Tensor:
        """See AttentionOperator."""
        self._require_full(call)
        layer.append(call.k, call.v)
        batch, heads, _, k_dim = call.q.shape
        kv_heads = call.k.shape[1]
        q = call.q.reshape(batch, kv_heads, heads // kv_heads, k_dim).float().cpu().contiguous().numpy()
        ids = self.attended_blocks(layer, q, with_window=layer.window is None)
        partial, partial_lse = self._attend_to(layer, call, q, ids)
        out = torch.from_numpy(partial).reshape(batch, heads, 1, -1).to(call.q.device)
        lse = torch.from_numpy(partial_lse).reshape(batch, heads, 1).to(call.q.device)
        if layer.window is not None:
            out, lse = merge_attention(out, lse, *layer.window.attend(call.q, call.scale, call.softcap))
        if self.engine.measure_recall:
            self._measure_recall(layer, call, q, lse)
        if call.sink is not None:
            out, lse = apply_sink(out, lse, call.sink)
        if self.keeps_received:
            self._scale, self._softcap = call.scale, call.softcap
            watched = torch.from_numpy(q).reshape(batch, heads, 1, k_dim), lse.cpu()
            layer.state.unseen = (*layer.state.unseen, watched)
            # In batches of a block's length, which costs a step little and holds few queries.
            if len(layer.state.unseen) >= layer.block_size:
                self._add_unseen(layer, layer.get_seq_length())
        layer.state.decoded += 1
        return out.to(call.q.dtype)

    def attended_blocks(self, layer: PagedLayer, q: np.ndarray, with_window: bool) -> np.ndarray:
        """The blocks that this step attends to.

        Args:
            q: [rows, kv_heads, group, k_dim] float32.
            with_window: whether Initial and Local are among them, or attended to elsewhere.

        Returns ids [rows, lists, blocks] int32: one list per row when the kv heads choose together (or everything is
        attended to), else one per kv head.
        """
        end = layer.context_end
        first = min(layer.initial_blocks, end)
        table = layer.block_tables
        if self.budget is None or self.budget >= end - first:
            chosen = table[:, None, first:end]
        elif self.budget == 0:
            chosen = table[:, None, :0]
        else:
            positions = self._selection(layer, q, table[:, first:end])
            chosen = np.take_along_axis(table[:, None, first:end], positions, axis=2)
        rows, lists, count = chosen.shape
        before, after = (first, table.shape[1] - end) if with_window else (0, 0)
        ids = np.empty((rows, lists, before + count + after), dtype=np.int32)
        ids[:, :, before : before + count] = chosen
        if with_window:
            ids[:, :, :before] = table[:, None, :first]
            ids[:, :, before + count :] = table[:, None, end:]
        return ids

    def _selection(self, layer: PagedLayer, q: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Positions in the Context [rows, lists, count] of this step: reused where the schedule says so, else chosen.

        KTransformers' pseudo code: the first layer of every `layer_step` layers selects, at every `token_step`-th
        token; all others take what was selected last.
        """
        settings, state = self.settings, layer.state
        lists = 1 if self.shared else q.shape[1]
        key = (self.layer_idx // settings.layer_step, layer.block_size, layer.initial_blocks, lists)
        due = state.decoded % settings.token_step == 0 and self.layer_idx % settings.layer_step == 0
        last = state.shared.get(key)
        # None where the group's first layer attends to everything; too long after a step back.
        if due or last is None or last[:, :, -1].max() >= context.shape[1]:
            state.shared[key] = last = self._best(layer, q, context)
        return last

    def _best(self, layer: PagedLayer, q: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Positions of the best blocks of `context` [rows, blocks] among those that preselection left."""
        assert layer.pool is not None
        assert self.budget is not None
        allowed = layer.state.allowed(context.shape[1])
        if allowed is not None and allowed.shape[2] <= self.budget:
            return allowed
        scores = block_scores(
            q,
            layer.pool.representative_array,
            np.ascontiguousarray(context),
            np.full(len(context), context.shape[1], dtype=np.int32),
            self.representative_type.score,
            threads=self.threads,
        )
        return select_blocks(scores, self.budget, self.shared, self.settings.group_reduce, allowed)

    def _attend_to(
        self, layer: PagedLayer, call: bridge.AttentionCall, q: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The kernel over blocks `ids` [rows, lists, blocks]: out [rows, kv_heads, group, v_dim] and lse."""
        pool = layer.pool
        assert pool is not None
        counts = np.full(ids.shape[:2], ids.shape[2], dtype=np.int32)
        return attend_blocks(
            q,
            pool.key_array,
            pool.value_array,
            ids,
            counts,
            pool.lengths,
            call.scale,
            call.softcap or 0.0,
            threads=self.threads,
        )

    def _add_unseen(self, layer: PagedLayer, length: int) -> None:
        """Add the attention of queries decoded so far to the generated tokens in Local, by which they are represented.

        `length` is the number of tokens that the last of these queries saw.
        """
        state: RetrievalState = layer.state
        if not state.unseen:
            return
        q, lse = (torch.cat(parts, dim=2) for parts in zip(*state.unseen, strict=True))
        state.unseen = ()
        start = max(layer.indexed_blocks, state.prompt_length // layer.block_size) * layer.block_size
        keys = torch.stack([row.read(start, length)[0] for row in layer.rows])
        layer.add_received(column_sums(q, lse, keys, self._scale, self._softcap).sum(dim=2), start)

    def _measure_recall(self, layer: PagedLayer, call: bridge.AttentionCall, q: np.ndarray, lse: torch.Tensor) -> None:
        """Add the share of the full attention mass that this step covered, the mean over rows and heads."""
        _, full = self._attend_to(layer, call, q, np.ascontiguousarray(layer.block_tables[:, None, :]))
        covered = torch.exp(lse.cpu().flatten() - torch.from_numpy(full).flatten())
        layer.state.recall_sum += float(covered.mean())
        layer.state.recall_steps += 1

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile what decoding needs, or load it from Numba's cache, before the first token waits for it."""
        kind, settings = storage.get(self.settings.kv_type), self.settings
        pool = BlockPool(1, kv_heads, settings.block_size, k_dim, v_dim, kind, settings.representative_num)
        q, ids, counts = np.zeros((1, kv_heads, group, k_dim), np.float32), pool.allocate(1), np.ones((1, 1), np.int32)
        attend_blocks(q, pool.key_array, pool.value_array, ids[None, None], counts, pool.lengths, 1.0, softcap)
        block_scores(q, pool.representative_array, ids[None], counts[0], self.representative_type.score)

    # -- what others ask

    @classmethod
    def registries(cls) -> Mapping[str, Mapping[str, str]]:
        """See Operator."""
        known = {name: representatives.get(name).meaning for name in representatives.names()}
        return {"Representatives of a block (representative_type)": known}

    def settings_in_layer(self) -> dict[str, Any]:
        """See Operator."""
        own: dict[str, Any] = {"second_block_count": "all" if self.budget is None else self.budget}
        if self.preselected is not None:
            own["preselect_block_count"] = self.preselected
        return super().settings_in_layer() | own

    def footprint(self, shape: KVShape) -> PagedFootprint:
        """See AttentionOperator."""
        return PagedFootprint.of(shape, self.settings, self.keeps_received)

    def attended_tokens(self, length: int) -> float:
        """See AttentionOperator."""
        return attended_tokens(length, self.settings, self.budget)

    @property
    def observed_queries(self) -> int:
        """See AttentionOperator."""
        return self.settings.observation_len
