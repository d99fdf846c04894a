"""What a context takes: exact bytes of the store in DRAM, and the memory where the model computes.

Everything here follows from the model's structure and the operators' settings; no weight is read, so a model on
torch's meta device is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpu_ops.attention_backend import missing
from gpu_ops.chunk_stream import ChunkStream
from gpu_ops.tiled_attention import KEY_TILE, QUERY_TILE
from hetero_kv.adapter import attention_module
from hetero_kv.adapter.footprint import (
    BytesPerToken,
    FootprintTerm,
    LayerFootprint,
    MemoryDemand,
    MemoryShare,
    StateFootprint,
    UntouchedFootprint,
    WindowFootprint,
    register,
    terms,
)
from hetero_kv.adapter.hidden_state_offload import obstacle, offloads_to_dram, tables_stay_on_gpu
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.recurrent import state_shapes
from hetero_kv.adapter.streamed_weights import bytes_of_room, decoder_layers
from hetero_kv.models import placing
from hetero_kv.planning.planned import Planned
from hetero_kv.planning.weights import parted, room_to_unpack, weight_sizes
from hetero_kv.settings.engine_settings import GPU, EngineSettings

WEIGHTS = register(FootprintTerm("weights", "weights"))
WEIGHTS_IN_DRAM = register(FootprintTerm("weights_in_dram", "weights of the layers in DRAM", in_dram=True))
UNPACKED = register(FootprintTerm("unpacked", "room in which packed weights are unpacked (prefill)"))
LAYER_KV = register(FootprintTerm("layer_kv", "one layer's keys and values (prefill)"))
HIDDEN = register(FootprintTerm("hidden", "hidden states and rotary tables (prefill)"))
HIDDEN_IN_DRAM = register(
    FootprintTerm("hidden_in_dram", "hidden states and rotary tables in DRAM (prefill)", in_dram=True)
)
ACTIVATIONS = register(FootprintTerm("activations", "one chunk's activations (prefill; an estimate)"))

#: What is only there while the model is loaded, or a prompt passes, or not a context's.
PASSING = frozenset({WEIGHTS, WEIGHTS_IN_DRAM, UNPACKED, LAYER_KV, HIDDEN, HIDDEN_IN_DRAM, ACTIVATIONS})

# Token ids and positions, int64 each.
_ID_BYTES = 16


@dataclass(frozen=True)
class Memory:
    """What a number of tokens takes, term by term; every registered term is an attribute too, `memory.weights`.

    Beside what the layers say there are these terms: `weights` of the model as they are kept, 0 where they are loaded
    already; `layer_kv`, one layer's keys and values while the prompt prefills; `hidden`, two buffers of hidden states,
    the rotary tables and the token ids, while the prompt prefills; `activations` of one chunk, an estimate.

    Attributes:
        sizes: term -> bytes; a term that nobody takes anything under may be missing.
    """

    sizes: Mapping[FootprintTerm, int]

    @classmethod
    def of(cls, shares: Iterable[MemoryShare]) -> Memory:
        """The sums; of what is common to layers, the largest."""
        own: dict[FootprintTerm, int] = {}
        common: dict[FootprintTerm, int] = {}
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
        """DRAM, whatever the model computes on: the block store, and what lies there to leave a GPU room."""
        return sum(size for term, size in self.sizes.items() if term.in_dram)

    @property
    def compute(self) -> int:
        """Memory where the model computes: the GPU's, or more DRAM."""
        return sum(size for term, size in self.sizes.items() if not term.in_dram)


@dataclass(frozen=True)
class Footprint:
    """What a model with its rules takes, as a function of the context's length and of how many sequences there are.

    Attributes:
        layers: the layers' caches.
        weights: bytes that loading the model will take where it computes; 0 when it is loaded.
        weights_in_dram: bytes that loading it will take in DRAM, under a GPU that has no room for all.
        element: bytes of one number where the model computes.
        chunk_size: tokens per prefill chunk.
        hidden_size, rotary_dim: of the model.
        heads: of queries.
        activations: bytes per token of a chunk, an estimate.
        on_gpu: whether the model computes on a GPU.
        hidden_device: the setting; "gpu" where hidden states cannot lie in DRAM.
        keeps_tables: whether rotary tables lie on the GPU all the same.
        unpacked: bytes of the room on a GPU in which packed weights are unpacked.
        tiles: whether prompts are attended to by tiles in float32 on a GPU.
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
        """Of an injected model, loaded or on the meta device.

        Args:
            dtype: the number type it will be loaded with; None for the one it has.
            on_gpu: whether it will compute on a GPU; None for where it is.
            stored: parameter -> the quantized type that its file holds; None where it holds numbers.
            gpu: free memory of the GPU, bytes, before the model is loaded; None where nothing is known of it.
        """
        model: Any = injection.model
        config = attention_module.text_config(model)
        device = next(model.parameters()).device.type
        element = (dtype or model.dtype).itemsize
        layers = tuple(_layers(injection, config))
        shapes = [layer.shape for layer in layers] or [KVShape.of(config)]
        largest = max(shapes, key=lambda shape: shape.bytes_per_token(1))
        weights, in_dram = bytes_of_room(model, torch.device("cuda")) if device == "cuda" else 0, 0
        if device == "meta":
            weights = sum(weight_sizes(model, dtype, stored or {}).values())
            if on_gpu and placing.offloads_to_dram(injection.engine.weights_device, weights, gpu):
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
        """The store's, over all layers."""
        return sum((layer.stored for layer in self.layers), BytesPerToken())

    def memory(self, tokens: int, batch: int = 1, forks: int = 0, stored: int = 0) -> Memory:
        """What a context takes at its peak, when a prompt up to that length has prefilled its last layer.

        Args:
            tokens: of each sequence.
            batch: sequences that are processed together.
            forks: of the cache, each grown to `tokens` with nothing shared.
            stored: tokens of each sequence that are there already, so that the longest prompt has the others.
        """
        prompt = max(1, tokens - stored)
        forward_tokens = min((layer.forward_tokens(prompt) for layer in self.layers), default=prompt)
        chunk_tokens = min(forward_tokens, self.chunk_size)
        demand = MemoryDemand(
            tokens, forward_tokens, batch, 1 + forks, self.element, self.on_gpu, chunk_tokens, self.heads
        )
        own = (
            MemoryShare(WEIGHTS, self.weights),
            MemoryShare(WEIGHTS_IN_DRAM, self.weights_in_dram),
            MemoryShare(UNPACKED, self.unpacked if self.on_gpu else 0),
            *self._hidden(tokens, forward_tokens, batch),
            MemoryShare(
                ACTIVATIONS, batch * (chunk_tokens * self.activations + self._attention_tiles(tokens, chunk_tokens))
            ),
        )
        # Layers prefill one after the other.
        whole = (
            MemoryShare(LAYER_KV, batch * layer.kv_bytes(tokens, demand), common=True)
            for layer in self.layers
            if layer.prefills_whole
        )
        return Memory.of((*(share for layer in self.layers for share in layer.shares(demand)), *own, *whole))

    def _hidden(self, tokens: int, forward_tokens: int, batch: int) -> Iterator[MemoryShare]:
        """Hidden states of a prompt, its rotary tables, token ids and positions."""
        tables = batch * forward_tokens * 2 * self.rotary_dim * self.element
        ids = batch * forward_tokens * _ID_BYTES
        walks = self.on_gpu and not any(layer.passes_in_strides for layer in self.layers)
        if not (walks and offloads_to_dram(self.hidden_device, tokens, self.chunk_size)):
            yield MemoryShare(HIDDEN, batch * forward_tokens * 2 * self.hidden_size * self.element + tables + ids)
            return
        on_the_way = ChunkStream.device_bytes(batch, self.hidden_size, self.element, self.chunk_size)
        # Of the tables, chunks of two layers' arguments; those that the model made, and the copies that are locked.
        chunk_of_tables = batch * self.chunk_size * 2 * self.rotary_dim * self.element
        yield MemoryShare(HIDDEN, on_the_way + 3 * chunk_of_tables + ids + (tables if self.keeps_tables else 0))
        yield MemoryShare(HIDDEN_IN_DRAM, batch * forward_tokens * self.hidden_size * self.element + 2 * tables)

    def _attention_tiles(self, tokens: int, chunk_tokens: int) -> int:
        """Of a tile of queries and keys in float32: scores and two tensors made of them, vectors, results."""
        if not (self.on_gpu and self.tiles):
            return 0
        queries, keys = min(chunk_tokens, QUERY_TILE), min(tokens, KEY_TILE)
        k_dim, v_dim = (max(getattr(layer.shape, dim) for layer in self.layers) for dim in ("k_dim", "v_dim"))
        numbers = 3 * queries * keys + queries * (k_dim + 3 * v_dim) + keys * max(k_dim, v_dim)
        return 4 * self.heads * numbers


def _lacks_kernels(engine: EngineSettings) -> bool:
    """Whether torch alone is to compute attention, or Triton is not there."""
    return engine.attention_backend == "torch" or missing("triton") is not None


def _wants_tiles(config: Any) -> bool:
    """Whether the flash attention of torch lacks what the model's attention has."""
    return bool(getattr(config, "attn_logit_softcapping", None)) or any(attention_module.own_windows(config))


def _obstacles(injection: Planned) -> bool:
    """Whether any of the modules that walk through layers cannot have hidden states in DRAM."""
    walkers = [module for module in injection.model.modules() if decoder_layers(module)]
    return not walkers or any(obstacle(module) is not None for module in walkers)


def _layers(injection: Planned, config: Any) -> Iterator[LayerFootprint]:
    """What each layer's operator says, and, where there is none, what transformers' own cache keeps."""
    modules = injection.model.modules()
    attentions = {module.layer_idx: module for module in modules if attention_module.is_attention(module)}
    operators = {operator.layer_idx: operator for operator in injection.attention_operators()}
    states = state_shapes(injection.model, config)
    for index, window in enumerate(attention_module.own_windows(config)):
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
    """Bytes per token of a chunk at the peak of a layer, an estimate: attention or MLP, whichever takes more."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    # The normed input, queries before and after rotation, keys and values repeated for the group, the output, and the
    # float32 partial results that are merged.
    attention = (2 * hidden + heads * (3 * shape.k_dim + 2 * shape.v_dim)) * element + 3 * 4 * heads * shape.v_dim
    width = _most(config, "intermediate_size") or 4 * hidden
    active = _most(config, "num_experts_per_tok")
    if active:
        width = max(width, active * (_most(config, "moe_intermediate_size") or width))
    return max(attention, (2 * hidden + 3 * width) * element) + 2 * 4 * hidden
