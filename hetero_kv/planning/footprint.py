"""What a context takes: exact bytes of the store in DRAM, and the memory where the model computes.

Everything here follows from the model's structure and the operators' settings; no weight is read, so a model on
torch's meta device is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetero_kv.adapter import bridge
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.families.bounded.entry_room import SLACK
from hetero_kv.families.bounded.eviction import EvictionPolicy
from hetero_kv.families.bounded.layer import BoundedLayer
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.shadowkv.footprint import LowRankFootprint
from hetero_kv.families.shadowkv.layer import LowRankLayer
from hetero_kv.families.window.layer import WindowLayer
from hetero_kv.store.pool import BlockPool

if TYPE_CHECKING:
    from hetero_kv.rules.injection import Injection

# Token ids and positions, int64 each.
_ID_BYTES = 16


@dataclass(frozen=True)
class BytesPerToken:
    """What one token takes in DRAM blocks, bytes.

    Attributes:
        keys, values: of the token.
        representatives: its share of what its block is chosen by: the representatives and, for types that need it, the
            attention that each key received.
    """

    keys: float = 0
    values: float = 0
    representatives: float = 0

    def __add__(self, other: BytesPerToken) -> BytesPerToken:
        return BytesPerToken(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def total(self) -> float:
        """All of it."""
        return self.keys + self.values + self.representatives


@dataclass(frozen=True)
class LayerFootprint:
    """One layer's cache: DRAM blocks where `block_size` is set, else entries that a policy keeps, else a window, else
    everything where the model is.

    Attributes:
        shape: of its keys and values.
        stored: bytes per token in DRAM blocks.
        block_size: tokens of a block.
        device_window: tokens of Initial and Local that a GPU has a copy of.
        sliding_window: keys that a query sees, in a layer with a sliding window of the model's own.
        policy: what drops entries, in a bounded layer.
        low_rank: what a ShadowKV layer takes beside its values in DRAM blocks.
    """

    shape: KVShape
    stored: BytesPerToken = field(default_factory=BytesPerToken)
    block_size: int | None = None
    device_window: int = 0
    sliding_window: int | None = None
    policy: EvictionPolicy | None = None
    low_rank: LowRankFootprint | None = None

    @classmethod
    def of(cls, cache_layer: Any, shape: KVShape) -> LayerFootprint:
        """Of an empty cache layer; a paged one makes its pool here, so give it the capacity of a block."""
        if isinstance(cache_layer, RetrievalLayer):
            return cls(
                shape,
                layer_bytes_per_token(cache_layer, shape),
                block_size=cache_layer.layout.block_size,
                device_window=(cache_layer.layout.sink_blocks + 1) * cache_layer.layout.block_size
                + cache_layer.layout.local_len,
            )
        if isinstance(cache_layer, LowRankLayer):
            keys, values = shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim
            stored = BytesPerToken(values=shape.kv_heads * cache_layer.storage.bytes_per_vector(shape.v_dim))
            low_rank = LowRankFootprint(cache_layer.settings, keys, values, shape.k_dim)
            return cls(shape, stored, block_size=cache_layer.chunk_size, low_rank=low_rank)
        if isinstance(cache_layer, BoundedLayer):
            return cls(shape, policy=cache_layer.policy)
        if isinstance(cache_layer, WindowLayer):
            return cls(shape, sliding_window=cache_layer.window)
        return cls(shape, sliding_window=getattr(cache_layer, "sliding_window", None))

    def blocks(self, tokens: int) -> int:
        """Tokens of the whole blocks that `tokens` take; 0 in a layer without blocks."""
        if self.low_rank is not None:
            return self.low_rank.context(tokens)
        return 0 if self.block_size is None else math.ceil(tokens / self.block_size) * self.block_size

    @property
    def prefills_whole(self) -> bool:
        """Whether all keys and values of a prompt are there at once while this layer prefills."""
        return self.block_size is not None or (self.policy is not None and not self.policy.strided)

    def passing(self, tokens: int) -> int:
        """Tokens of a prompt of `tokens` that pass through the layer at once."""
        stride = self.policy.stride(0, self.policy.budget_for(tokens)) if self.policy else None
        return tokens if stride is None else min(tokens, stride)

    def entries(self, tokens: int) -> int:
        """Entries that a bounded layer has at most, with those that undoing the present turn would come back to."""
        if self.policy is None:
            return 0
        kept = min(tokens, self.policy.budget_for(tokens))
        # Full prefill has its prompt in one layer at a time, unless all layers wait for each other.
        new = self.passing(tokens) if self.policy.strided or self.policy.settles_late else 0
        # Placed keys, while tokens are decoded and the budget is not full: half of what keys and values take.
        placed = kept // 2 if self.policy.reindexed else 0
        return 2 * kept + max(new, 2 * SLACK + placed)


def layer_bytes_per_token(layer: RetrievalLayer, shape: KVShape) -> BytesPerToken:
    """What a token takes in the DRAM blocks of one layer."""
    layout, kind = layer.layout, layer.storage
    key, value = (shape.kv_heads * kind.bytes_per_vector(dim) for dim in (shape.k_dim, shape.v_dim))
    pool = BlockPool(
        1,
        shape.kv_heads,
        layout.block_size,
        shape.k_dim,
        shape.v_dim,
        kind,
        layer.representative_num,
        layout.closes_alone,
    )
    return BytesPerToken(key, value, pool.bytes_per_block / layout.block_size - key - value)


@dataclass(frozen=True)
class Memory:
    """What a number of tokens takes, bytes, term by term.

    Attributes:
        keys_values, representatives: the store in DRAM blocks, in whole blocks.
        weights: of the model in its number type; 0 where they are loaded already.
        low_rank: what ShadowKV layers keep where the model computes: factors, landmarks, chunks, newest tokens.
        windows: on a GPU, its copy of every retrieval layer's Initial and Local.
        sliding: what the model's own sliding-window layers keep.
        untouched: keys and values of layers without an operator.
        entries: keys and values that eviction policies keep.
        layer_kv: one layer's keys and values while the prompt prefills.
        hidden: two buffers of hidden states, the rotary tables and the token ids, while the prompt prefills.
        activations: of one chunk, an estimate.
    """

    keys_values: int
    representatives: int
    weights: int
    low_rank: int
    windows: int
    sliding: int
    untouched: int
    entries: int
    layer_kv: int
    hidden: int
    activations: int

    @property
    def store(self) -> int:
        """DRAM of the block store."""
        return self.keys_values + self.representatives

    @property
    def compute(self) -> int:
        """Memory where the model computes: the GPU's, or more DRAM."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.store


@dataclass(frozen=True)
class Footprint:
    """What a model with its rules takes, as a function of the context's length and of how many sequences there are.

    Attributes:
        layers: the layers' caches.
        weights: bytes that loading the model will take; 0 when it is loaded.
        element: bytes of one number where the model computes.
        chunk_size: tokens per prefill chunk.
        hidden_size, rotary_dim: of the model.
        activations: bytes per token of a chunk, an estimate.
        on_gpu: whether the model computes on a GPU.
    """

    layers: tuple[LayerFootprint, ...]
    weights: int
    element: int
    chunk_size: int
    hidden_size: int
    rotary_dim: int
    activations: int
    on_gpu: bool

    @classmethod
    def of(cls, injection: Injection, *, dtype: torch.dtype | None = None, on_gpu: bool | None = None) -> Footprint:
        """Of an injected model, loaded or on the meta device.

        Args:
            dtype: the number type it will be loaded with; None for the one it has.
            on_gpu: whether it will compute on a GPU; None for where it is.
        """
        model: Any = injection.model
        config = bridge.text_config(model)
        device = next(model.parameters()).device.type
        attentions = {m.layer_idx: m for m in model.modules() if bridge.is_attention(m)}
        element = (dtype or model.dtype).itemsize
        layers = tuple(
            LayerFootprint.of(cache_layer, KVShape.of_attention(attentions[index], config))
            for index, cache_layer in enumerate(injection.cache_layers())
            if index in attentions
        )
        shapes = [layer.shape for layer in layers] or [KVShape.of(config)]
        largest = max(shapes, key=lambda shape: shape.bytes_per_token(1))
        return cls(
            layers=layers,
            weights=_weight_bytes(model, dtype) if device == "meta" else 0,
            element=element,
            chunk_size=injection.engine.chunk_size,
            hidden_size=config.hidden_size,
            rotary_dim=getattr(config, "qk_rope_head_dim", None) or largest.k_dim,
            activations=_chunk_activations(config, largest, element),
            on_gpu=device not in ("cpu", "meta") if on_gpu is None else on_gpu,
        )

    @property
    def bytes_per_token(self) -> BytesPerToken:
        """The store's, over all layers."""
        return sum((layer.stored for layer in self.layers), BytesPerToken())

    def memory(self, tokens: int, batch: int = 1, forks: int = 0) -> Memory:
        """What a context takes at its peak, when a prompt of that length has prefilled its last layer.

        Args:
            tokens: of each sequence.
            batch: sequences that are processed together.
            forks: of the cache, each grown to `tokens` with nothing shared.
        """
        kept = batch * (1 + forks)
        paged = [layer for layer in self.layers if layer.block_size is not None]
        elsewhere = [layer for layer in self.layers if layer.block_size is None and layer.policy is None]
        passing = min((layer.passing(tokens) for layer in self.layers), default=tokens)
        return Memory(
            keys_values=kept
            * sum(round(layer.blocks(tokens) * (layer.stored.keys + layer.stored.values)) for layer in paged),
            representatives=kept * sum(round(layer.blocks(tokens) * layer.stored.representatives) for layer in paged),
            weights=self.weights,
            low_rank=self._low_rank(tokens, batch, 1 + forks)
            + (self._unfactored(tokens, batch) if passing < tokens else 0),
            windows=kept * sum(self._kv(layer, layer.device_window) for layer in paged) if self.on_gpu else 0,
            # A window lies in a buffer with slack for as many tokens again.
            sliding=kept
            * sum(
                self._kv(layer, min(tokens, window) + window)
                for layer in elsewhere
                if (window := layer.sliding_window) is not None
            ),
            untouched=kept * sum(self._kv(layer, tokens) for layer in elsewhere if layer.sliding_window is None),
            entries=kept * sum(self._kv(layer, layer.entries(tokens)) for layer in self.layers),
            layer_kv=batch * max((self._kv(layer, tokens) for layer in self.layers if layer.prefills_whole), default=0),
            hidden=batch * passing * (2 * (self.hidden_size + self.rotary_dim) * self.element + _ID_BYTES),
            activations=batch * min(passing, self.chunk_size) * self.activations,
        )

    def _low_rank(self, tokens: int, batch: int, caches: int) -> int:
        found = [layer.low_rank for layer in self.layers if layer.low_rank is not None]
        # One table of rotations serves all layers and rows.
        rotary = max((layer.rotary(tokens) for layer in found), default=0)
        return caches * self.element * (batch * sum(layer.numbers(tokens) for layer in found) + rotary)

    def _unfactored(self, tokens: int, batch: int) -> int:
        """What ShadowKV layers keep as it is until the last stride of a prompt has come."""
        return batch * sum(self._kv(layer, tokens) for layer in self.layers if layer.low_rank is not None)

    def _kv(self, layer: LayerFootprint, tokens: int) -> int:
        return tokens * layer.shape.bytes_per_token(self.element)


def _weight_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Parameters and buffers, each once however often it is tied, in `dtype` or their own type."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    return sum(
        tensor.numel() * (dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size())
        for tensor in tensors
    )


def _chunk_activations(config: Any, shape: KVShape, element: int) -> int:
    """Bytes per token of a chunk at the peak of a layer, an estimate: attention or MLP, whichever takes more."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    # The normed input, queries before and after rotation, keys and values repeated for the group, the output, and the
    # float32 partial results that are merged.
    attention = (2 * hidden + heads * (3 * shape.k_dim + 2 * shape.v_dim)) * element + 3 * 4 * heads * shape.v_dim
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    active = getattr(config, "num_experts_per_tok", None)
    if active:
        width = max(width, active * (getattr(config, "moe_intermediate_size", None) or width))
    return max(attention, (2 * hidden + 3 * width) * element) + 2 * 4 * hidden
