"""ShadowKV (arXiv:2410.21465): low-rank keys on the compute device, values in DRAM, chunks of both retrieved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from hetero_kv.adapter import attention_module, bridge
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.replacement import Operator
from hetero_kv.adapter.rope_capture import RopeCapture
from hetero_kv.adapter.rotary_probe import rotation_of
from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.adapter.rotation import Rotation
from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.recorded_prompt import RecordedPrompt
from hetero_kv.engine.statistics import BLOCK_RECALL, READ_BYTES
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError, UnsupportedModelError
from hetero_kv.families.gpu_prefill.pieces import attention_after_pieces
from hetero_kv.families.shadowkv import cpu_decode, device_decode
from hetero_kv.families.shadowkv.footprint import LowRankFootprint
from hetero_kv.families.shadowkv.landmarks import chosen_chunks
from hetero_kv.families.shadowkv.layer import LowRankLayer
from hetero_kv.families.shadowkv.layout import attended_tokens, chunk_budget
from hetero_kv.families.shadowkv.read_bytes import read_bytes
from hetero_kv.families.shadowkv.settings import SHADOWKV, ShadowKVSettings
from hetero_kv.families.shadowkv.statistics import CHUNK_HIT_RATE, KEY_ENERGY_OUTSIDE, KEY_RANK
from hetero_kv.families.sparse_prefill.attention import PromptAttention
from hetero_kv.families.window.attention import SlidingWindowAttention
from hetero_kv.gpu_ops.attention import attention_with_lse, folded_heads, unfolded_heads
from hetero_kv.gpu_ops.host_copies import on_host
from hetero_kv.gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.gpu_ops.side_stream import joined_on_error
from hetero_kv.settings.engine_settings import EngineSettings

_NONE_CHOSEN = np.empty((0, 0, 0), np.int64)


class ShadowKVAttention(RopeCapture):
    """Prefills exactly, in chunks; decodes over outlier chunks, the chunks that landmarks choose, and Recent.

    With full rank and a budget that covers the sequence the result is full attention, to the value type's precision.
    """

    meaning, settings_class = SHADOWKV.meaning, SHADOWKV.settings_class
    prefills_exactly = True
    records_attention = True
    statistics = (BLOCK_RECALL, CHUNK_HIT_RATE, KEY_RANK, KEY_ENERGY_OUTSIDE, READ_BYTES)
    rotation_use = (
        "ShadowKVAttention undoes the rotation of keys, which needs one rotation per position; use RetrievalAttention "
        "there"
    )

    settings: ShadowKVSettings

    def __init__(self, path: str, wrapped: nn.Module, settings: ShadowKVSettings, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        channels = self._key_channels()
        self._sized, self._energy = settings.sized(channels), settings.energy(channels)
        self.prompt_attention = PromptAttention(self, settings)
        if settings.prefills_sparsely:
            self.prefills_exactly = False
        self.threads = min(engine.resolved_threads(), numba.config.NUMBA_NUM_THREADS)

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """Returns the sliding-window operator for layers whose model has a sliding window."""
        if attention_module.has_window(module):
            return SlidingWindowAttention
        return cls

    def _key_channels(self) -> int:
        """Number of key channels of all kv heads. Raises HeteroKVError if they are fewer than the rank."""
        shape = KVShape.of_attention(self.wrapped, self._own_config)
        channels, rank = shape.kv_heads * shape.k_dim, self.settings.rank
        if rank != "auto" and rank > channels:
            raise HeteroKVError(
                f"{self.path}: rank is {rank}, but the keys of this layer have {shape.kv_heads} kv heads of "
                f"{shape.k_dim}, {channels} channels together; set rank to auto, or to at most {channels} (full rank)"
            )
        return channels

    def new_cache_layer(self) -> LowRankLayer:
        layer = LowRankLayer(self._sized, self._energy)
        layer.loads_past = self.settings.prefills_sparsely
        return layer

    # -- rotation

    def _record(self, step: Step, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Record the rotation of the new tokens, in one table shared with other layers of the same rotation."""
        layers = step.group.layers
        layer: LowRankLayer = layers[self.layer_idx]
        start = layer.get_seq_length()
        own = layer.factors.rotary
        if own is not None and own.record(cos, sin, start):
            return
        tables = (other.factors.rotary for other in layers if isinstance(other, LowRankLayer))
        for table in tables:
            if table is not None and table.rotation == rotation and table.is_source(cos) and table is not own:
                layer.factors.rotary = table
                break
        else:
            layer.factors.rotary = RotaryTable(rotation) if own is None else own.until(start)
        layer.factors.rotary.record(cos, sin, start)

    # -- prefill

    def load_prefill(self, layer: LowRankLayer, step: Step, recorded: RecordedPrompt) -> None:
        if recorded.rotation is None:
            raise HeteroKVError(
                f"{self.path}: the prefill was recorded without position embeddings, so that the rotation of its keys "
                "cannot be undone; prefill the prompt under ShadowKVAttention's own rules"
            )
        if self.rotation is None:
            # Probe one token: all rows of `hidden` are the same memory.
            hidden = recorded.keys.new_empty(1, 1, self._own_config.hidden_size).expand(1, recorded.length, -1)
            probed = {"hidden_states": hidden, "position_embeddings": recorded.rotation, "attention_mask": None}
            self.rotation = rotation_of(self.path, self.wrapped, (), probed, self.rotation_use)
        self._record(step, self.rotation, *recorded.rotation)
        buffer = PrefillBuffer(recorded.keys, recorded.values, past=0, length=recorded.length)
        layer.store(step, recorded.keys, recorded.values, buffer)

    def prefill_chunk(self, layer: LowRankLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        self._require_full(call)
        past_k, past_v = layer.extend(call.k, call.v)
        assert layer.prefill_buffer is not None
        if layer.prefill_buffer.first:
            out, total = attention_after_pieces(layer.pieces(0, call.k), call, past_k, past_v)
        else:
            out, total = self.prompt_attention(step, call, past_k, past_v)
        if layer.record is not None and step.stores:
            buffer = layer.prefill_buffer
            for first, keys, _ in layer.pieces(0, call.k) if buffer.first else ():
                layer.record.add_keys(call.q, keys[0], first + torch.arange(keys.shape[2]), call.scale, call.softcap)
            own = buffer.keys[0, :, : buffer.length - buffer.first]
            positions = torch.arange(buffer.first, buffer.length)
            layer.record.add_keys(call.q, own, positions, call.scale, call.softcap)
            layer.record.complete(total, sink=call.sink)
        return out.to(call.q.dtype)

    def _require_full(self, call: bridge.AttentionCall) -> None:
        if call.sliding_window is not None:
            raise UnsupportedModelError(
                f"{self.path}: the model requests a sliding window of {call.sliding_window}; use "
                "SlidingWindowAttention there"
            )

    # -- decode

    def decode_step(self, layer: LowRankLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if call.sliding_window is not None:
            self._require_full(call)
        layer.store(step, call.k, call.v)
        decoded = self._decoded_in_torch
        if cpu_decode.supports(layer, call):
            decoded = self._decoded_by_kernels
        elif layer.context.outliers is not None and device_decode.supports(layer, call.k):
            decoded = self._decoded_without_waits
        out, lse, missed = decoded(layer, step, call)
        layer.read = layer.read.plus(read_bytes(layer, missed))
        if self.engine.measure_recall:
            self._measure_recall(layer, call, lse)
        if call.sink is not None:
            out, lse = apply_sink(out, lse, call.sink)
        if layer.record is not None:
            self._record_token(layer, call, lse)
        layer.project(step)
        return out.to(call.q.dtype)

    def _record_token(self, layer: LowRankLayer, call: bridge.AttentionCall, total: torch.Tensor) -> None:
        """Record the attention of a decoded token, with keys as the factors reconstruct them."""
        record, length = layer.record, layer.stored_length
        assert record is not None
        outliers = layer.context.outliers
        if outliers is not None:
            residents = outliers.residents
            chunks = torch.cat([outliers.ids[0].cpu(), residents.ids[0].cpu()], dim=1)
            at = (chunks[:, :, None] * layer.chunk_size + torch.arange(layer.chunk_size)).flatten(1)
            record.add_keys(call.q, residents.keys[0], at, call.scale, call.softcap)
        recent = torch.arange(layer.context.length, length)
        record.add_keys(call.q, layer.recent_keys.entries[0], recent, call.scale, call.softcap)
        record.complete(total, sink=call.sink)

    def _decoded_by_kernels(
        self, layer: LowRankLayer, step: Step, call: bridge.AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Attention of a step by `cpu_decode`.

        Returns out [batch, heads, 1, v_dim], lse, and how many chosen chunks were in no slot, over all rows and heads.
        """
        q, missed = cpu_decode.queries(call), 0
        if layer.context.outliers is not None:
            count = self._count(layer, layer.context.outliers.ids)
            chosen = cpu_decode.chosen(layer, call, q, count, self.threads) if count else _NONE_CHOSEN
            hits = cpu_decode.load_chunks(layer, step, chosen, self.threads)
            layer.count_choices(chosen.size, hits)
            missed = chosen.size - hits
        return *cpu_decode.attention(layer, call, q, self.threads), missed

    def _decoded_without_waits(
        self, layer: LowRankLayer, step: Step, call: bridge.AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As `_decoded_by_kernels`, by `device_decode`. Misses are counted on the device; returns 0."""
        assert layer.context.outliers is not None
        chosen = device_decode.chosen(layer, call, self._count(layer, layer.context.outliers.ids))
        with joined_on_error(call.k.device):
            update = device_decode.ChunkLoading(layer, step, chosen)
            out, lse = _folded_attention(call, layer.recent_keys.entries, layer.recent_values.entries)
            residents = update.finished()
        layer.count_choices(chosen.numel(), chosen.numel())
        if residents.tokens:
            out, lse = merge_attention(out, lse, *_folded_attention(call, residents.keys, residents.values))
        return *unfolded_heads(call.q, out, lse), 0

    def _decoded_in_torch(
        self, layer: LowRankLayer, step: Step, call: bridge.AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As `_decoded_by_kernels`, on any device."""
        missed = 0
        out, lse = _attention(call, layer.recent_keys.entries, layer.recent_values.entries)
        if layer.context.outliers is not None:
            residents = layer.context.outliers.residents
            (chosen,) = on_host(self._chosen_in_torch(layer, call))
            hits = residents.hold(chosen, layer.rebuilt, layer.fetched, layer.chunks)
            layer.count_choices(chosen.numel(), hits)
            missed = chosen.numel() - hits
            if residents.keys.shape[2]:
                out, lse = merge_attention(out, lse, *_attention(call, residents.keys, residents.values))
        return out, lse, missed

    def chosen(self, layer: LowRankLayer, call: bridge.AttentionCall) -> torch.Tensor:
        """Chunks of the Context that this step attends to apart from the outliers, [batch, kv_heads, n] int64."""
        assert layer.context.outliers is not None
        count = self._count(layer, layer.context.outliers.ids)
        if count and cpu_decode.supports(layer, call):
            return torch.from_numpy(cpu_decode.chosen(layer, call, cpu_decode.queries(call), count, self.threads))
        return self._chosen_in_torch(layer, call)

    def _chosen_in_torch(self, layer: LowRankLayer, call: bridge.AttentionCall) -> torch.Tensor:
        assert layer.context.outliers is not None
        outliers = layer.context.outliers.ids
        count = self._count(layer, outliers)
        if count == 0:
            return outliers[:, :, :0]
        return chosen_chunks(call.q, layer.landmarks.entries, outliers, count, call.scale, call.softcap)

    def _count(self, layer: LowRankLayer, outliers: torch.Tensor) -> int:
        """Number of chunks to choose apart from the outliers [batch, kv_heads, n]."""
        chunks = layer.chunks
        return min(chunk_budget(layer.group.prompt_length, chunks, self.settings), chunks - outliers.shape[2])

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        weight = next(self.wrapped.parameters())
        if weight.device.type == "cpu":
            stored = self.settings.value_storage.kernel
            chunk_size = self.settings.landmark_chunk_size
            cpu_decode.compile_kernels(weight.dtype, stored, group, k_dim, v_dim, chunk_size)
        self.prompt_attention.compile(self._own_config.dtype, k_dim, v_dim, softcap)

    def _measure_recall(self, layer: LowRankLayer, call: bridge.AttentionCall, lse: torch.Tensor) -> None:
        """Record the attended share of the full attention mass, with keys as the factors reconstruct them."""
        full = lse
        if layer.context.length:
            keys, values = (
                part.new_empty(*part.shape[:2], layer.stored_length, part.shape[3]) for part in (call.k, call.v)
            )
            layer.load(keys, values)
            full = _attention(call, keys, values)[1]
        layer.count(layer.counted.with_recall(float(torch.exp(lse.float() - full.float()).mean())))

    # -- description

    @classmethod
    def registries(cls) -> Mapping[str, Mapping[str, str]]:
        return SHADOWKV.registries()

    def stored_by(self) -> dict[str, Any]:
        idle = self.settings.idle_prefill_settings
        return {name: value for name, value in self.settings_in_layer().items() if name not in idle}

    def footprint(self, shape: KVShape) -> LowRankFootprint:
        return LowRankFootprint.of(shape, self.settings)

    def attended_tokens(self, length: int) -> float:
        """Attended tokens without generated ones; see AttentionOperator."""
        return attended_tokens(length, self._sized)


def _attention(
    call: bridge.AttentionCall, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per head to keys and values [batch, kv_heads, tokens, dim]: out, like q, and lse."""
    return unfolded_heads(call.q, *_folded_attention(call, keys, values))


def _folded_attention(
    call: bridge.AttentionCall, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attention`, with heads [batch, kv_heads, group] in their memory order, so that merging needs no copy."""
    return attention_with_lse(folded_heads(call.q, keys.shape[1]), keys, values, call.scale, call.softcap)
