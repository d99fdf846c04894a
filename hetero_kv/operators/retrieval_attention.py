"""Retrieval attention: everything kept in DRAM, the best blocks attended to on the CPU, where they lie.

KTransformers' sparse-attention framework: a sequence is Initial | Context | Local; Initial and Local are attended
in full, the Context through the blocks whose representatives score best against the query.
"""

from __future__ import annotations

import numpy as np
import torch
from cpu_ops.scores import block_scores
from torch import nn

from cpu_ops.attention import attend_blocks
from gpu_ops.attention import chunk_attention
from gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.config import EngineSettings, RetrievalSettings
from hetero_kv.kv import storage
from hetero_kv.kv.paged_layer import PagedLayer
from hetero_kv.kv.pool import BlockPool
from hetero_kv.operators import bridge
from hetero_kv.operators.base import AttentionOperator, Operator
from hetero_kv.operators.sliding_window_attention import SlidingWindowAttention
from hetero_kv.selection import representatives
from hetero_kv.selection.block_scores import select_blocks

# Blocks whose representatives are computed at once: bounds the float32 copy of their keys.
_INDEXED_AT_ONCE = 64


class RetrievalAttention(AttentionOperator):
    """Prefills exactly, chunk by chunk; decodes over Initial, Local and the best `second_block_count` blocks.

    With a budget that covers the Context the result is full attention, to the storage type's precision.
    """

    meaning = "keeps everything in DRAM blocks, attends to the blocks that the query retrieves"
    settings_class = RetrievalSettings

    settings: RetrievalSettings

    def __init__(self, path: str, wrapped: nn.Module, settings: RetrievalSettings, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.representative_type = representatives.get(settings.representative_type)
        self.threads = engine.resolved_threads()

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """A layer with a sliding window of the model's own keeps that: retrieval never applies to it."""
        if hasattr(module, "config") and hasattr(module, "layer_idx") and bridge.layer_window(module) is not None:
            return SlidingWindowAttention
        return cls

    def new_cache_layer(self, capacity: int) -> PagedLayer:
        """See AttentionOperator."""
        settings = self.settings
        return PagedLayer(
            capacity,
            settings.block_size,
            settings.initial_len,
            settings.local_windows_len,
            storage.get(settings.kv_type),
            settings.representative_num,
            on_stored=self.index_context,
        )

    def index_context(self, layer: PagedLayer) -> None:
        """Compute the representatives of blocks that have entered the Context."""
        pool, end = layer.pool, layer.context_end
        assert pool is not None
        start = max(layer.indexed_blocks, layer.initial_blocks)
        for first in range(start, end, _INDEXED_AT_ONCE):
            for row in layer.rows:
                ids = torch.from_numpy(row.ids[first : min(first + _INDEXED_AT_ONCE, end)].astype(np.int64))
                vectors = self.representative_type.compute(pool.keys[ids].float(), layer.representative_num)
                pool.representatives[ids] = vectors.to(pool.representatives.dtype)
        layer.indexed_blocks = end

    def prefill_chunk(self, layer: PagedLayer, call: bridge.AttentionCall) -> torch.Tensor:
        """See AttentionOperator."""
        if call.sliding_window is not None:
            raise bridge.UnsupportedModelError(
                f"{self.path}: the model asks for a sliding window of {call.sliding_window}; "
                "use SlidingWindowAttention there"
            )
        past_k, past_v = layer.extend(call.k, call.v)
        out, lse = chunk_attention(call.q, past_k, past_v, call.k, call.v, call.scale, call.softcap)
        return out if call.sink is None else apply_sink(out, lse, call.sink)

    def decode_step(self, layer: PagedLayer, call: bridge.AttentionCall) -> torch.Tensor:
        """See AttentionOperator."""
        layer.append(call.k, call.v)
        pool = layer.pool
        assert pool is not None
        batch, heads, _, k_dim = call.q.shape
        kv_heads = call.k.shape[1]
        q = call.q.reshape(batch, kv_heads, heads // kv_heads, k_dim).float().cpu().contiguous().numpy()
        ids, counts = self.attended_blocks(layer, q, with_window=layer.window is None)
        partial, partial_lse = attend_blocks(
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
        out = torch.from_numpy(partial).reshape(batch, heads, 1, -1).to(call.q.device)
        lse = torch.from_numpy(partial_lse).reshape(batch, heads, 1).to(call.q.device)
        if layer.window is not None:
            out, lse = merge_attention(out, lse, *layer.window.attend(call.q, call.scale, call.softcap))
        if call.sink is not None:
            out = apply_sink(out, lse, call.sink)
        return out.to(call.q.dtype)

    def attended_blocks(self, layer: PagedLayer, q: np.ndarray, with_window: bool) -> tuple[np.ndarray, np.ndarray]:
        """The blocks that this step attends to.

        Args:
            q: [rows, kv_heads, group, k_dim] float32.
            with_window: whether Initial and Local are among them, or attended to elsewhere.

        Returns (ids [rows, lists, blocks] int32, counts [rows, lists] int32), one list per row when the kv heads choose
        together (or everything is attended to), else one per kv head.
        """
        end = layer.context_end
        first = min(layer.initial_blocks, end)
        table = layer.block_tables
        budget = self.settings.second_block_count
        if budget == "all" or budget >= end - first:
            chosen = table[:, None, first:end]
        elif budget == 0:
            chosen = table[:, None, :0]
        else:
            chosen = self._retrieved(layer, q, np.ascontiguousarray(table[:, first:end]), int(budget))
        rows, lists, count = chosen.shape
        before, after = (first, table.shape[1] - end) if with_window else (0, 0)
        ids = np.empty((rows, lists, before + count + after), dtype=np.int32)
        ids[:, :, before : before + count] = chosen
        if with_window:
            ids[:, :, :before] = table[:, None, :first]
            ids[:, :, before + count :] = table[:, None, end:]
        return ids, np.full((rows, lists), ids.shape[2], dtype=np.int32)

    def _retrieved(self, layer: PagedLayer, q: np.ndarray, context: np.ndarray, budget: int) -> np.ndarray:
        """The `budget` best of the blocks in `context` [rows, blocks]: ids [rows, lists, budget] int32."""
        assert layer.pool is not None
        scores = block_scores(
            q,
            layer.pool.representative_array,
            context,
            np.full(len(context), context.shape[1], dtype=np.int32),
            self.representative_type.score,
            threads=self.threads,
        )
        positions = select_blocks(scores, budget, shared=self.settings.head_select_mode == "SHARED")
        return np.take_along_axis(context[:, None, :], positions, axis=2)

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile what decoding needs, or load it from Numba's cache, before the first token waits for it."""
        kind, settings = storage.get(self.settings.kv_type), self.settings
        pool = BlockPool(1, kv_heads, settings.block_size, k_dim, v_dim, kind, settings.representative_num)
        q, ids, counts = np.zeros((1, kv_heads, group, k_dim), np.float32), pool.allocate(1), np.ones((1, 1), np.int32)
        attend_blocks(q, pool.key_array, pool.value_array, ids[None, None], counts, pool.lengths, 1.0, softcap)
        block_scores(q, pool.representative_array, ids[None], counts[0], self.representative_type.score)
