"""The memory footprint of a context: exact bytes of the store in DRAM, and the memory of the computing device.

It follows from the model's structure and the operators' settings alone. No weight is read, so a model on torch's meta
device suffices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpu_ops.attention_backend import missing
from gpu_ops.chunk_stream import ChunkStream
from gpu_ops.tiled_attention import KEY_TILE, QUERY_TILE
from hetero_kv.adapter import bridge
from hetero_kv.adapter.footprint import (
    BytesPerToken,
    Demand,
    LayerFootprint,
    Share,
    StateFootprint,
    Term,
    UntouchedFootprint,
    WindowFootprint,
    register,
    terms,
)
from hetero_kv.adapter.hidden_states import lie_in_dram, obstacle, tables_stay_on_gpu
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.recurrent import state_shapes
from hetero_kv.adapter.streamed_weights import bytes_of_room, walked_layers
from hetero_kv.models import placing
from hetero_kv.planning.planned import Planned
from hetero_kv.planning.weights import parted, room_to_unpack, weight_sizes
from hetero_kv.settings.engine_settings import GPU, EngineSettings

WEIGHTS = register(Term("weights", "weights"))
WEIGHTS_IN_DRAM = register(Term("weights_in_dram", "weights of the layers in DRAM", in_dram=True))
UNPACKED = register(Term("unpacked", "room in which packed weights are unpacked (prefill)"))
LAYER_KV = register(Term("layer_kv", "one layer's keys and values (prefill)"))
HIDDEN = register(Term("hidden", "hidden states and rotary tables (prefill)"))
HIDDEN_IN_DRAM = register(Term("hidden_in_dram", "hidden states and rotary tables in DRAM (prefill)", in_dram=True))
ACTIVATIONS = register(Term("activations", "one chunk's activations (prefill; an estimate)"))

#: Terms that occur only during loading or prefill, or do not belong to a context.
PASSING = frozenset({WEIGHTS, WEIGHTS_IN_DRAM, UNPACKED, LAYER_KV, HIDDEN, HIDDEN_IN_DRAM, ACTIVATIONS})

# Token ids and positions, int64 each.
_ID_BYTES = 16


@dataclass(frozen=True)
class Memory:
    """The memory for a number of tokens, term by term; every registered term is an attribute too, `memory.weights`.

    Besides the terms of the layers there are: `weights` of the model in their storage format, 0 if they are loaded;
    `layer_kv`, one layer's keys and values during prefill; `hidden`, two buffers of hidden states, the rotary tables
    and the token ids during prefill; `activations` of one chunk, an estimate.

    Attributes:
        sizes: term -> bytes; a term of 0 bytes may be missing.
    """

    sizes: Mapping[Term, int]

    @classmethod
    def of(cls, shares: Iterable[Share]) -> Memory:
        """The sum per term; of shares that layers have in common, only the largest counts."""
        own: dict[Term, int] = {}
        common: dict[Term, int] = {}
        for share in shares:
            if share.common:
                common[share.term] = max(common.get(share.term, 0), share.size)
            else:
                own[share.term] = own.get(share.term, 0) + share.size
        return cls({term: own.get(term, 0) + common.get(term, 0) for term in own | common})

    def by_name(self) -> dict[str, int]:
        """Every registered term's name -> bytes."""
        return {term.name: self.sizes.get(term, 0) for term in terms()}

    def __getattr__(self, name: str) -> int:
        found = next((term for term in terms() if term.name == name), None)
        if found is None:
            raise AttributeError(f"{name!r} is no term of a footprint; known: {', '.join(t.name for t in terms())}")
        return self.sizes.get(found, 0)

    @property
    def store(self) -> int:
        """DRAM on any computing device, bytes: the block store, and whatever is offloaded from a GPU."""
        return sum(size for term, size in self.sizes.items() if term.in_dram)

    @property
    def compute(self) -> int:
        """Memory of the computing device, bytes: the GPU's, or further DRAM."""
        return sum(size for term, size in self.sizes.items() if not term.in_dram)


@dataclass(frozen=True)
class Footprint:
    """The memory of a model with its rules, as a function of the context's length and the number of sequences.

    Attributes:
        layers: the footprints of the layers' caches.
        weights: bytes that loading the model takes on the computing device; 0 when it is loaded.
        weights_in_dram: bytes that loading it takes in DRAM, if the GPU has no room for all weights.
        element: bytes per number on the computing device.
        chunk_size: tokens per prefill chunk.
        hidden_size, rotary_dim: the model's.
        heads: query heads.
        activations: bytes per token of a chunk, an estimate.
        on_gpu: whether the model computes on a GPU.
        hidden_device: the setting; "gpu" if hidden states cannot be in DRAM.
        keeps_tables: whether rotary tables are on the GPU even if hidden states are in DRAM.
        unpacked: bytes of the GPU buffer in which packed weights are unpacked.
        tiles: whether a GPU computes prefill attention by tiles in float32.
    """

    layers: tuple[LayerFootprint, ...]
    weights: int
    element: int
    chunk_size: int
    hidden_size: int
    rotary_dim: int
    heads: int
    activations: int
    on_gpu: bool
    hidden_device: str
    keeps_tables: bool
    tiles: bool
    weights_in_dram: int = 0
    unpacked: int = 0

    @classmethod
    def of(
        cls,
        injection: Planned,
        *,
        dtype: torch.dtype | None = None,
        on_gpu: bool | None = None,
        stored: Mapping[str, str] | None = None,
        gpu: int | None = None,
    ) -> Footprint:
        """The footprint of an injected model, loaded or on the meta device.

        Args:
            dtype: the dtype that it will have; None for its present one.
            on_gpu: whether it will compute on a GPU; None for its present device.
            stored: parameter -> the quantised type in its file; None for a file without quantised parameters.
            gpu: free memory of the GPU, bytes, before the model is loaded; None if unknown.
        """
        model: Any = injection.model
        config = bridge.text_config(model)
        device = next(model.parameters()).device.type
        element = (dtype or model.dtype).itemsize
        layers = tuple(_layers(injection, config))
        shapes = [layer.shape for layer in layers] or [KVShape.of(config)]
        largest = max(shapes, key=lambda shape: shape.bytes_per_token(1))
        weights, in_dram = bytes_of_room(model, torch.device("cuda")) if device == "cuda" else 0, 0
        if device == "meta":
            weights = sum(weight_sizes(model, dtype, stored or {}).values())
            if on_gpu and placing.lie_in_dram(injection.engine.weights_device, weights, gpu):
                weights, in_dram = parted(model, weights, dtype, stored or {})
        return cls(
            layers=layers,
            weights=weights,
            weights_in_dram=in_dram,
            unpacked=room_to_unpack(model, element, stored or {}),
            element=element,
            chunk_size=injection.engine.chunk_size,
            hidden_size=config.hidden_size,
            rotary_dim=getattr(config, "qk_rope_head_dim", None) or largest.k_dim,
            heads=config.num_attention_heads,
            activations=_chunk_activations(config, largest, element),
            on_gpu=device not in ("cpu", "meta") if on_gpu is None else on_gpu,
            hidden_device=GPU if _obstacles(injection) else injection.engine.hidden_device,
            keeps_tables=tables_stay_on_gpu(model),
            tiles=_lacks_kernels(injection.engine) and (element > 2 or _wants_tiles(config)),
        )

    @property
    def bytes_per_token(self) -> BytesPerToken:
        """Bytes per token of the store, over all layers."""
        return sum((layer.stored for layer in self.layers), BytesPerToken())

    def memory(self, tokens: int, batch: int = 1, forks: int = 0, stored: int = 0) -> Memory:
        """The peak memory of a context, reached when a prompt of this length prefills the last layer.

        Args:
            tokens: the length of each sequence.
            batch: sequences that are processed together.
            forks: forks of the cache, each grown to `tokens` with no shared blocks.
            stored: resident tokens of each sequence; the longest prompt has the rest.
        """
        prompt = max(1, tokens - stored)
        forward_tokens = min((layer.forward_tokens(prompt) for layer in self.layers), default=prompt)
        chunk_tokens = min(forward_tokens, self.chunk_size)
        demand = Demand(tokens, forward_tokens, batch, 1 + forks, self.element, self.on_gpu, chunk_tokens, self.heads)
        own = (
            Share(WEIGHTS, self.weights),
            Share(WEIGHTS_IN_DRAM, self.weights_in_dram),
            Share(UNPACKED, self.unpacked if self.on_gpu else 0),
            *self._hidden(tokens, forward_tokens, batch),
            Share(ACTIVATIONS, batch * (chunk_tokens * self.activations + self._attention_tiles(tokens, chunk_tokens))),
        )
        # Layers prefill one after the other.
        whole = (
            Share(LAYER_KV, batch * layer.kv_bytes(tokens, demand), common=True)
            for layer in self.layers
            if layer.prefills_whole
        )
        return Memory.of((*(share for layer in self.layers for share in layer.shares(demand)), *own, *whole))

    def _hidden(self, tokens: int, forward_tokens: int, batch: int) -> Iterator[Share]:
        """Hidden states of a prompt, its rotary tables, token ids and positions."""
        tables = batch * forward_tokens * 2 * self.rotary_dim * self.element
        ids = batch * forward_tokens * _ID_BYTES
        walks = self.on_gpu and not any(layer.passes_in_strides for layer in self.layers)
        if not (walks and lie_in_dram(self.hidden_device, tokens, self.chunk_size)):
            yield Share(HIDDEN, batch * forward_tokens * 2 * self.hidden_size * self.element + tables + ids)
            return
        on_the_way = ChunkStream.device_bytes(batch, self.hidden_size, self.element, self.chunk_size)
        # Rotary tables: chunks of two layers' arguments on the GPU; in DRAM the model's tables and their pinned copies.
        chunk_of_tables = batch * self.chunk_size * 2 * self.rotary_dim * self.element
        yield Share(HIDDEN, on_the_way + 3 * chunk_of_tables + ids + (tables if self.keeps_tables else 0))
        yield Share(HIDDEN_IN_DRAM, batch * forward_tokens * self.hidden_size * self.element + 2 * tables)

    def _attention_tiles(self, tokens: int, chunk_tokens: int) -> int:
        """Bytes of one float32 tile: scores and two tensors derived from them, queries, keys or values, and results."""
        if not (self.on_gpu and self.tiles):
            return 0
        queries, keys = min(chunk_tokens, QUERY_TILE), min(tokens, KEY_TILE)
        k_dim, v_dim = (max(getattr(layer.shape, dim) for layer in self.layers) for dim in ("k_dim", "v_dim"))
        numbers = 3 * queries * keys + queries * (k_dim + 3 * v_dim) + keys * max(k_dim, v_dim)
        return 4 * self.heads * numbers


def _lacks_kernels(engine: EngineSettings) -> bool:
    """Whether attention runs in torch alone, by the setting or because Triton is missing."""
    return engine.attention_backend == "torch" or missing("triton") is not None


def _wants_tiles(config: Any) -> bool:
    """Whether the model's attention has a softcap or a window, which torch's flash attention lacks."""
    return bool(getattr(config, "attn_logit_softcapping", None)) or any(bridge.own_windows(config))


def _obstacles(injection: Planned) -> bool:
    """Whether any module that iterates over layers is unable to have hidden states in DRAM."""
    walkers = [module for module in injection.model.modules() if walked_layers(module)]
    return not walkers or any(obstacle(module) is not None for module in walkers)


def _layers(injection: Planned, config: Any) -> Iterator[LayerFootprint]:
    """The footprint of each layer by its operator, or of transformers' cache for a layer without one."""
    attentions = {module.layer_idx: module for module in injection.model.modules() if bridge.is_attention(module)}
    operators = {operator.layer_idx: operator for operator in injection.attention_operators()}
    states = state_shapes(injection.model, config)
    for index, window in enumerate(bridge.own_windows(config)):
        if index in states:
            yield StateFootprint(KVShape(0, 0, 0), state_bytes=states[index].nbytes)
        if index not in attentions:
            continue
        shape = KVShape.of_attention(attentions[index], config)
        if index in operators:
            yield operators[index].footprint(shape)
        elif window is None:
            yield UntouchedFootprint(shape)
        else:
            yield WindowFootprint(shape, sliding_window=window, is_untouched=True)


def _most(config: Any, name: str) -> int:
    """A setting; the largest where each layer has its own (Gemma 3n, Hunyuan); 0 where there is none."""
    value = getattr(config, name, None) or 0
    return int(max(value) if isinstance(value, list | tuple) else value)


def _chunk_activations(config: Any, shape: KVShape, element: int) -> int:
    """Estimated peak bytes per token of a chunk in a layer: the larger of attention and MLP."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    # The normed input, queries before and after rotation, keys and values repeated for the group, the output, and
    # float32 partial results before their merge.
    attention = (2 * hidden + heads * (3 * shape.k_dim + 2 * shape.v_dim)) * element + 3 * 4 * heads * shape.v_dim
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    if isinstance(width, list | tuple):
        # Gemma 3n has one width per layer.
        width = max(width)
    active = getattr(config, "num_experts_per_tok", None)
    if active:
        width = max(width, active * (_most(config, "moe_intermediate_size") or width))
    return max(attention, (2 * hidden + 3 * width) * element) + 2 * 4 * hidden
