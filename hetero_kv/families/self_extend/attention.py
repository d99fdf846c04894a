"""Self-Extend (Jin et al. 2024, arXiv:2401.01325) with retrieval: contexts longer than the model's training length.

A query sees its neighbours at their own positions, and all other keys at grouped positions, each shared by several
tokens. So no distance exceeds those in training. One softmax covers both parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from hetero_kv.adapter import bridge
from hetero_kv.adapter.footprint import MemoryDemand, MemoryShare
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.rope_capture import RopeCapture
from hetero_kv.adapter.rotary_probe import require_constant_rotation
from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.adapter.rotation import Rotation
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.families.gpu_prefill.pieces import attention_after_pieces
from hetero_kv.families.retrieval.attention import RetrievalAttention
from hetero_kv.families.retrieval.block_choice import Derived
from hetero_kv.families.retrieval.footprint import WINDOWS, PagedFootprint
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.self_extend.layer import SelfExtendLayer
from hetero_kv.families.self_extend.settings import SELF_EXTEND, SharedPositionSettings
from hetero_kv.gpu_ops.attention import sliding_window_attention
from hetero_kv.gpu_ops.merge import apply_sink, merge_attention
from hetero_kv.settings.engine_settings import EngineSettings


class SelfExtendAttention(RopeCapture, RetrievalAttention):
    """Retrieval with grouped positions; plain retrieval with groups of one token, or while all keys are neighbours.

    Blocks store keys at grouped positions, and are chosen by them. All neighbours are in Local, which must be at least
    as long: the operator raises `local_windows_len` to `neighbour_window`.
    """

    meaning, settings_class = SELF_EXTEND.meaning, SELF_EXTEND.settings_class
    prefills_exactly = False
    rotation_use = (
        "SelfExtendAttention groups positions, which needs one rotation per position; use RetrievalAttention there"
    )

    cpu_part = "positions are grouped, and the CPU attends to keys at grouped positions"
    #: The class of its cache layers.
    layer_class: ClassVar[type[SelfExtendLayer]] = SelfExtendLayer

    settings: SharedPositionSettings

    def __init__(self, path: str, wrapped: nn.Module, settings: SharedPositionSettings, engine: EngineSettings) -> None:
        local = max(settings.local_windows_len, settings.shared_positions[1])
        super().__init__(path, wrapped, replace(settings, local_windows_len=local), engine)
        require_constant_rotation(path, wrapped, type(self).__name__, "use RetrievalAttention there")

    def new_cache_layer(self) -> SelfExtendLayer:
        layout = RetrievalLayout.of_settings(self.settings, finalizes_per_sequence=self.accumulates)
        derived = Derived() if self.budget is None else Derived.of(self.settings)
        return self.layer_class(layout, self.settings, derived)

    # -- rotation

    def _record(self, step: Step, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Record the rotation of the new tokens. Layers with the same rotation share one table.

        Raises UnsupportedModelError if the model rotates a position differently than before.
        """
        layers = step.group.layers
        layer: SelfExtendLayer = layers[self.layer_idx]
        if layer.rotary is None:
            others = (other.rotary for other in layers if isinstance(other, SelfExtendLayer))
            same = (table for table in others if table is not None and table.rotation == rotation)
            layer.rotary = next((table for table in same if table.is_source(cos)), None) or RotaryTable(rotation)
        if not layer.rotary.record(cos, sin, layer.get_seq_length()):
            raise UnsupportedModelError(
                f"{self.path}: the model rotates a position differently than before; {type(self).__name__} needs one "
                "rotation per position, use RetrievalAttention there"
            )

    def _grouped(self, layer: SelfExtendLayer, call: bridge.AttentionCall, start: int) -> bridge.AttentionCall:
        """The call with queries and keys at grouped positions; `start` is the position of the first token."""
        assert layer.rotary is not None
        q = layer.positions.grouped_queries(call.q, start, layer.rotary)
        return replace(call, q=q, k=layer.positions.grouped_keys(call.k, start, layer.rotary))

    # -- attention

    def _attended_chunk(
        self, layer: SelfExtendLayer, step: Step, call: bridge.AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exact attention to neighbours and to all keys beyond them."""
        start = layer.get_seq_length()
        grouped = self._grouped(layer, call, start)
        past_k, past_v = layer.extend(grouped.k, call.v)
        out, lse = self._near(layer, call, start, past_k, past_v)
        first = max(0, layer.positions.neighbours - start)
        if first < call.q.shape[2]:
            far = self._far(layer, grouped, start, first)
            out[:, :, first:], lse[:, :, first:] = merge_attention(out[:, :, first:], lse[:, :, first:], *far)
        return *((out, lse) if call.sink is None else apply_sink(out, lse, call.sink)), grouped.q

    def _near(
        self, layer: SelfExtendLayer, call: bridge.AttentionCall, start: int, past_k: torch.Tensor, past_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a chunk to its neighbours.

        past_k, at grouped positions, and past_v are what the buffer has from before the chunk's position `start`.
        """
        assert layer.rotary is not None
        window = layer.positions.neighbours
        first = max(0, start - window + 1)
        near = slice(first - start + past_k.shape[2], None)
        before = layer.positions.neighbouring_keys(past_k[:, :, near], first, layer.rotary)
        keys, values = torch.cat([before, call.k], dim=2), torch.cat([past_v[:, :, near], call.v], dim=2)
        layer.record_neighbours(call.q, start, keys, first)
        return sliding_window_attention(call.q, keys, values, window, call.scale, call.softcap)

    def _far(
        self, layer: SelfExtendLayer, grouped: bridge.AttentionCall, start: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a chunk's queries from `first` on to the keys beyond their neighbours.

        `start` is the chunk's position. The last of these keys is `neighbours` tokens before its query, so this is
        causal attention to keys shifted by as many tokens.
        """
        buffer = layer.prefill_buffer
        assert buffer is not None
        q = grouped.q[:, :, first:]
        begin = start + first - layer.positions.neighbours - buffer.first
        past, own = slice(0, begin), slice(begin, begin + q.shape[2])
        keys, values = buffer.keys, buffer.values
        far = replace(grouped, q=q, k=keys[:, :, own], v=values[:, :, own], sink=None)
        stored = layer.pieces(0, q) if buffer.first else iter(())
        return attention_after_pieces(stored, far, keys[:, :, past], values[:, :, past])

    def decode_step(self, layer: SelfExtendLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if call.sliding_window is not None:
            self._refuse_window(call.sliding_window)
        grouped = self._grouped(layer, call, step.past)
        blocks = layer.blocks_for(step, grouped.k, call.v)
        return self._decode_with_window(layer, step, blocks, grouped)

    def _measure_recall(
        self, layer: SelfExtendLayer, blocks: StepBlocks, call: bridge.AttentionCall, lse: torch.Tensor
    ) -> None:
        """As in RetrievalAttention; `call` is at grouped positions, as the Context is."""
        assert layer.window is not None
        size, kv_heads = layer.layout.block_size, call.k.shape[1]
        keys = layer.read_keys(min(layer.layout.sink_blocks, blocks.finalized) * size, blocks.finalized * size).float()
        scores = call.q.float().cpu().unflatten(1, (kv_heads, -1)).squeeze(3) @ keys.mT * call.scale
        if call.softcap is not None:
            scores = call.softcap * (scores / call.softcap).tanh()
        window_lse = layer.window.attend(call.q, call.scale, call.softcap)[1].cpu().flatten()
        full = torch.logaddexp(scores.logsumexp(-1).flatten(), window_lse)
        covered = float(torch.exp(lse.cpu().flatten() - full).mean())
        layer.state = replace(layer.state, recall=layer.state.recall.plus(covered))

    # -- descriptions for the engine

    def footprint(self, shape: KVShape) -> PagedFootprint:
        paged = super().footprint(shape)
        return _GroupedFootprint(**{name: getattr(paged, name) for name in paged.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class _GroupedFootprint(PagedFootprint):
    """Blocks in DRAM; Initial and Local on the compute device, with two copies of the keys."""

    def shares(self, demand: MemoryDemand) -> Iterator[MemoryShare]:
        yield from (share for share in super().shares(demand) if share.term is not WINDOWS)
        keys = self.device_window * self.shape.kv_heads * self.shape.k_dim * demand.element
        yield MemoryShare(WINDOWS, demand.sequences * (self.kv_bytes(self.device_window, demand) + keys))
