"""Computes the memory of a context: the exact bytes of the store in DRAM, and the memory of the computing device.

The inputs are the model's structure and the operators' settings. No weights are read, so a model on torch's meta device
suffices.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

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
from hetero_kv.gpu_ops.attention_backend import missing
from hetero_kv.gpu_ops.chunk_stream import ChunkStream
from hetero_kv.gpu_ops.tiled_attention import KEY_TILE, QUERY_TILE
from hetero_kv.models import placing
from hetero_kv.planning.planned import Planned
from hetero_kv.planning.weights import (
    experts_in_dram,
    experts_sizes,
    parted,
    room_for_experts,
    room_to_unpack,
    weight_sizes,
)
from hetero_kv.settings.engine_settings import GPU, EngineSettings

WEIGHTS = register(FootprintTerm("weights", "weights"))
WEIGHTS_IN_DRAM = register(FootprintTerm("weights_in_dram", "weights of the layers or experts in DRAM", in_dram=True))
EXPERTS = register(FootprintTerm("experts", "experts on their way from DRAM (prefill)"))
UNPACKED = register(FootprintTerm("unpacked", "buffer for unpacking weights (prefill)"))
LAYER_KV = register(FootprintTerm("layer_kv", "one layer's keys and values (prefill)"))
HIDDEN = register(FootprintTerm("hidden", "hidden states and rotary tables (prefill)"))
HIDDEN_IN_DRAM = register(
    FootprintTerm("hidden_in_dram", "hidden states and rotary tables in DRAM (prefill)", in_dram=True)
)
ACTIVATIONS = register(FootprintTerm("activations", "one chunk's activations (prefill; an estimate)"))

#: Terms that a context does not keep: the model's own, and those of prefill.
TRANSIENT = frozenset({WEIGHTS, WEIGHTS_IN_DRAM, EXPERTS, UNPACKED, LAYER_KV, HIDDEN, HIDDEN_IN_DRAM, ACTIVATIONS})

# Token ids and positions, int64 each.
_ID_BYTES = 16


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a number of tokens, term by term; every registered term is an attribute too (`memory.weights`).

    Besides the layers' terms there are: `weights`, in the form in which they are kept, 0 if they are loaded already;
    `layer_kv`, one layer's keys and values during prefill; `hidden`, two buffers of hidden states, the rotary tables
    and the token ids during prefill; `activations` of one chunk, an estimate.

    Attributes:
        sizes: term -> bytes; unused terms may be missing.
    """

    sizes: Mapping[FootprintTerm, int]

    @classmethod
    def of(cls, shares: Iterable[MemoryShare]) -> MemoryUse:
        """The sum of the shares; of shares that layers have in common, only the largest counts."""
        sizes: dict[FootprintTerm, int] = {}
        common: dict[tuple[FootprintTerm, Hashable], int] = {}
        for share in shares:
            counted = share.size
            if share.common:
                before = common.get((share.term, share.common), 0)
                counted = max(0, share.size - before)
                common[share.term, share.common] = before + counted
            sizes[share.term] = sizes.get(share.term, 0) + counted
        return cls(sizes)

    def by_name(self) -> dict[str, int]:
        """Every registered term's name -> bytes."""
        return {term.name: self.sizes.get(term, 0) for term in terms()}

    def __getattr__(self, name: str) -> int:
        found = next((term for term in terms() if term.name == name), None)
        if found is None:
            raise AttributeError(f"{name!r} is not a term of a footprint; known: {', '.join(t.name for t in terms())}")
        return self.sizes.get(found, 0)

    @property
    def store(self) -> int:
        """DRAM on any device: the block store, and what is offloaded from a GPU."""
        return sum(size for term, size in self.sizes.items() if term.in_dram)

    @property
    def compute(self) -> int:
        """Memory of the computing device: the GPU's, or additional DRAM."""
        return sum(size for term, size in self.sizes.items() if not term.in_dram)


@dataclass(frozen=True)
class Footprint:
    """The memory of a model with its rules, as a function of the context's length and the number of sequences.

    Attributes:
        layers: the layers' caches.
        weights: bytes of weights that are still to be loaded on the computing device; 0 for a loaded model.
        weights_in_dram: bytes of weights that are still to be loaded into DRAM, because a GPU is too small for them.
        experts: bytes on a GPU for experts on their way from DRAM, where they are.
        element: bytes of a number on the computing device.
        chunk_size: tokens per prefill chunk.
        hidden_size, rotary_dim: the model's.
        heads: the number of query heads; 0 for a model of states alone.
        activations: bytes per token of a chunk, an estimate.
        on_gpu: whether the model computes on a GPU.
        hidden_device: the setting; "gpu" if hidden states cannot be in DRAM.
        keeps_tables: whether rotary tables stay on the GPU even then.
        unpacked: bytes of the buffer on a GPU into which packed weights are unpacked.
        sparse_drafts: whether tokens are guessed by attention to few blocks, as is done on a CPU only.
        tiles: whether prompts attend by float32 tiles on a GPU.
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
    experts: int = 0
    unpacked: int = 0
    sparse_drafts: bool = False

    @classmethod
    def of(
        cls,
        injection: Planned,
        *,
        dtype: torch.dtype | None = None,
        on_gpu: bool | None = None,
        stored: Mapping[str, str] | None = None,
        gpu: int | None = None,
        experts_device: str | None = None,
    ) -> Footprint:
        """The footprint of an injected model, loaded or on the meta device.

        Args:
            dtype: the dtype that it will be loaded with; None for its present one.
            on_gpu: whether it will compute on a GPU; None for its present device.
            stored: parameter -> the quantized type in its file; None if the file is not quantized.
            gpu: free memory of the GPU before the model is loaded, bytes; None if unknown.
            experts_device: where a mixture's experts will be; None for the setting's place.
        """
        model: Any = injection.model
        config = attention_module.text_config(model)
        device = next(model.parameters()).device.type
        element = (dtype or model.dtype).itemsize
        computes_on_gpu = device not in ("cpu", "meta") if on_gpu is None else on_gpu
        layers = tuple(_layers(injection, config))
        shapes = [layer.shape for layer in layers] or [KVShape.of(config)]
        largest = max(shapes, key=lambda shape: shape.bytes_per_token(1))
        weights, in_dram = bytes_of_room(model, torch.device("cuda")) if device == "cuda" else 0, 0
        keeps_experts = experts_in_dram(model, torch.device(device)) > 0
        if device == "meta":
            weights = sum(weight_sizes(model, dtype, stored or {}).values())
            if on_gpu:
                where = experts_device or injection.engine.experts_device
                weights, in_dram, keeps_experts = _placed(injection, weights, dtype, stored or {}, gpu, where)
        return cls(
            layers=layers,
            weights=weights,
            weights_in_dram=in_dram,
            experts=room_for_experts(model, dtype, stored or {}) if keeps_experts else 0,
            unpacked=room_to_unpack(model, element, stored or {}),
            element=element,
            chunk_size=injection.engine.chunk_size,
            hidden_size=config.hidden_size,
            rotary_dim=getattr(config, "qk_rope_head_dim", None) or largest.k_dim,
            heads=_most(config, "num_attention_heads"),
            activations=_chunk_activations(config, largest, element),
            on_gpu=computes_on_gpu,
            hidden_device=GPU if _obstacles(injection) else injection.engine.hidden_device,
            keeps_tables=tables_stay_on_gpu(model),
            tiles=_lacks_kernels(injection.engine) and (element > 2 or _wants_tiles(config)),
            sparse_drafts=injection.sparse_drafts and not computes_on_gpu,
        )

    @property
    def bytes_per_token(self) -> BytesPerToken:
        """The store's bytes per token over all layers."""
        return sum((layer.stored for layer in self.layers), BytesPerToken())

    def memory(self, tokens: int, batch: int = 1, forks: int = 0, stored: int = 0) -> MemoryUse:
        """The peak memory of a context, when a prompt up to that length prefills its last layer.

        Args:
            tokens: the length of each sequence.
            batch: sequences that are processed together.
            forks: forks of the cache, each grown to `tokens` without shared blocks.
            stored: tokens of each sequence that are stored already; the longest prompt has the others.
        """
        prompt = max(1, tokens - stored)
        forward_tokens = min((layer.forward_tokens(prompt) for layer in self.layers), default=prompt)
        chunk_tokens = min(forward_tokens, self.chunk_size)
        demand = MemoryDemand(
            tokens, forward_tokens, batch, 1 + forks, self.element, self.on_gpu, chunk_tokens, self.heads,
            self.sparse_drafts,
        )  # fmt: skip
        own = (
            MemoryShare(WEIGHTS, self.weights),
            MemoryShare(WEIGHTS_IN_DRAM, self.weights_in_dram),
            MemoryShare(EXPERTS, self.experts),
            MemoryShare(UNPACKED, self.unpacked if self.on_gpu else 0),
            *self._hidden(tokens, forward_tokens, batch),
            MemoryShare(
                ACTIVATIONS, batch * (chunk_tokens * self.activations + self._attention_tiles(tokens, chunk_tokens))
            ),
        )
        # Layers prefill one after the other, so the largest counts.
        whole = (
            MemoryShare(LAYER_KV, batch * layer.kv_bytes(tokens, demand), common=True)
            for layer in self.layers
            if layer.prefills_whole
        )
        return MemoryUse.of((*(share for layer in self.layers for share in layer.shares(demand)), *own, *whole))

    def _hidden(self, tokens: int, forward_tokens: int, batch: int) -> Iterator[MemoryShare]:
        """The hidden states of a prompt, its rotary tables, token ids and positions."""
        tables = batch * forward_tokens * 2 * self.rotary_dim * self.element
        ids = batch * forward_tokens * _ID_BYTES
        walks = self.on_gpu and not any(layer.passes_in_strides for layer in self.layers)
        if not (walks and offloads_to_dram(self.hidden_device, tokens, self.chunk_size)):
            yield MemoryShare(HIDDEN, batch * forward_tokens * 2 * self.hidden_size * self.element + tables + ids)
            return
        on_the_way = ChunkStream.device_bytes(batch, self.hidden_size, self.element, self.chunk_size)
        # Three chunks of the tables: two layers' arguments, and the locked copies; then the tables that the model made.
        chunk_of_tables = batch * self.chunk_size * 2 * self.rotary_dim * self.element
        yield MemoryShare(HIDDEN, on_the_way + 3 * chunk_of_tables + ids + (tables if self.keeps_tables else 0))
        yield MemoryShare(HIDDEN_IN_DRAM, batch * forward_tokens * self.hidden_size * self.element + 2 * tables)

    def _attention_tiles(self, tokens: int, chunk_tokens: int) -> int:
        """Bytes of one float32 tile: the scores and two tensors of their shape, queries, keys, values and results."""
        if not (self.on_gpu and self.tiles):
            return 0
        queries, keys = min(chunk_tokens, QUERY_TILE), min(tokens, KEY_TILE)
        k_dim, v_dim = (max(getattr(layer.shape, dim) for layer in self.layers) for dim in ("k_dim", "v_dim"))
        numbers = 3 * queries * keys + queries * (k_dim + 3 * v_dim) + keys * max(k_dim, v_dim)
        return 4 * self.heads * numbers


def _placed(
    injection: Planned, weights: int, dtype: torch.dtype | None, stored: Mapping[str, str], gpu: int | None, where: str
) -> tuple[int, int, bool]:
    """Bytes of weights on a GPU with `gpu` free bytes and in DRAM, and whether the latter are experts.

    Args:
        weights: bytes of all weights.
        where: the setting `experts_device` in force.
    """
    layers, experts = injection.engine.weights_device, sum(experts_sizes(injection.model, dtype, stored))
    if placing.experts_offload_to_dram(where, layers, weights, experts, gpu):
        return weights - experts, experts, experts > 0
    if placing.offloads_to_dram(layers, weights, gpu):
        return *parted(injection.model, weights, dtype, stored), False
    return weights, 0, False


def _lacks_kernels(engine: EngineSettings) -> bool:
    """Whether only torch computes attention, by the setting or because Triton is missing."""
    return engine.attention_backend == "torch" or missing("triton") is not None


def _wants_tiles(config: Any) -> bool:
    """Whether the model's attention has soft-capping or windows, which torch's flash attention lacks."""
    return bool(getattr(config, "attn_logit_softcapping", None)) or any(attention_module.own_windows(config))


def _obstacles(injection: Planned) -> bool:
    """Whether a module that runs the layers cannot keep hidden states in DRAM."""
    walkers = [module for module in injection.model.modules() if decoder_layers(module)]
    return not walkers or any(obstacle(module) is not None for module in walkers)


def _layers(injection: Planned, config: Any) -> Iterator[LayerFootprint]:
    """The footprint of each layer: its operator's, or that of transformers' cache for a layer without one."""
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
    """A setting of the model; the largest if layers have their own (Gemma 3n, Hunyuan); 0 without it."""
    value = getattr(config, name, None) or 0
    return int(max(value) if isinstance(value, list | tuple) else value)


def _chunk_activations(config: Any, shape: KVShape, element: int) -> int:
    """An estimate of a layer's peak in bytes per token of a chunk: the larger of attention and MLP."""
    heads, hidden = _most(config, "num_attention_heads"), config.hidden_size
    # The normed input, queries before and after RoPE, keys and values repeated for the group, the output, and float32
    # partial results before they are merged.
    attention = (2 * hidden + heads * (3 * shape.k_dim + 2 * shape.v_dim)) * element + 3 * 4 * heads * shape.v_dim
    width = _most(config, "intermediate_size") or 4 * hidden
    active = _most(config, "num_experts_per_tok")
    if active:
        width = max(width, active * (_most(config, "moe_intermediate_size") or width))
    return max(attention, (2 * hidden + 3 * width) * element) + 2 * 4 * hidden
