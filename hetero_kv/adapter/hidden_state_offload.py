"""Hidden states of a long prompt in DRAM, between the layers of a model on a GPU.

The embeddings go to DRAM chunk by chunk. Each layer, and the final norm, copies the next chunk to the GPU while it
computes the present one, and copies the output back over the input. Operations of the model's own forward between
layers run on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from hetero_kv.adapter import chunking
from hetero_kv.adapter.cache_argument import passed_cache
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.chunked_module import ChunkedModule
from hetero_kv.adapter.foreign import has_hooks
from hetero_kv.adapter.model_call import ModelCall, Signature
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.streamed_weights import stream_weights
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.gpu_ops.chunk_stream import ChunkStream
from hetero_kv.gpu_ops.page_locked import PageLocked
from hetero_kv.settings.engine_settings import DRAM, GPU, EngineSettings

#: Up to this many chunks, `auto` keeps hidden states on the GPU: the buffers of chunks in flight would take as much
#: memory.
_FEW_CHUNKS = 2


def offloads_to_dram(hidden_device: str, tokens: int, chunk_size: int) -> bool:
    """Whether the hidden states of a prompt are in DRAM between the layers of a model on a GPU.

    Args:
        hidden_device: the setting; `gpu` for a model whose states cannot be in DRAM (`obstacle`).
    """
    return hidden_device != GPU and tokens > (1 if hidden_device == DRAM else _FEW_CHUNKS) * chunk_size


def obstacle(model: nn.Module) -> str | None:
    """The part of a module that cannot work with hidden states in DRAM; None when all parts can."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if any(layer.is_recurrent for layer in model.modules() if isinstance(layer, ChunkedDecoderLayer)):
        return "some of its layers are recurrent"
    for name, child in model.named_children():
        modules = child if isinstance(child, nn.ModuleList) else [child]
        if child is embedding or all(isinstance(each, ChunkedDecoderLayer | ChunkedModule) for each in modules):
            continue
        if any(True for _ in child.parameters()):
            return f"{name} ({type(child).__name__}) does not run in chunks"
    return None if isinstance(embedding, nn.Module) else "it has no input embeddings"


def tables_stay_on_gpu(model: nn.Module) -> bool:
    """Whether whole rotary tables stay on the GPU: operators that record rotations recognise them by address."""
    return any(isinstance(module, AttentionOperator) and module.changes_arguments for module in model.modules())


def logits_to_keep(model: nn.Module, call: ModelCall) -> int:
    """The number of last tokens of a call whose hidden states the model's head reads; 0 for all.

    The last layer skips the other tokens' hidden states. It is 0 where a foreign part after the layers might read them.
    """
    count = call.arguments.get("logits_to_keep", 0)
    is_number = isinstance(count, int) and not (count and call.shape[1] > 1 and has_hooks(model, ChunkedDecoderLayer))
    return count if is_number else 0


def offload_hidden_states(model: Any, forward: Callable[..., Any], engine: EngineSettings) -> Callable[..., Any]:
    """Wrap `forward` of the module that walks through layers: long prompts keep their hidden states in DRAM.

    The engine's settings decide. Raises, when called, UnsupportedModelError when the setting demands DRAM and the model
    has parts that cannot work with it.
    """
    signature = Signature(forward)

    @functools.wraps(forward)
    def offloading_forward(*args: Any, **kwargs: Any) -> Any:
        call = signature.call(args, kwargs)
        if (tokens := call.inputs) is not None:
            stream_weights(model, tokens.device)
        cache = passed_cache(call.arguments)
        if not isinstance(cache, HeteroCache) or not _is_long_prompt(call, cache, engine):
            return forward(*args, **kwargs)
        if reason := obstacle(model):
            if engine.hidden_device == DRAM:
                raise UnsupportedModelError(
                    f"hidden_device is {DRAM!r}, but the hidden states of {type(model).__name__} cannot be in DRAM: "
                    f"{reason}; set hidden_device to {GPU}"
                )
            return forward(*args, **kwargs)
        return _offloaded(model, call, engine.chunk_size, cache.required_batch.request.logits_to_keep)

    return offloading_forward


def _is_long_prompt(call: ModelCall, cache: HeteroCache, engine: EngineSettings) -> bool:
    ids = call.token_ids
    return (
        ids is not None
        and ids.device.type == "cuda"
        and offloads_to_dram(engine.hidden_device, ids.shape[1], engine.chunk_size)
        and cache.strided is None
    )


def _offloaded(model: Any, call: ModelCall, chunk_size: int, kept: int) -> Any:
    """The call's output, computed with hidden states in DRAM; the last `kept` hidden states, or all, are on the GPU."""
    ids = call.token_ids
    assert ids is not None
    rotary = _rotary_buffers(model)
    # The model's forward creates positions and rotary tables on the device of its hidden states. Copies are
    # page-locked.
    moved = {
        name: _sent_to_host(value) if name in chunking.SEQUENCE_DIM else value for name, value in call.arguments.items()
    }
    on_host = [_sent_to_host(buffer) for _, _, buffer in rotary]
    torch.cuda.current_stream(ids.device).synchronize()
    offload = _Offload(model.get_input_embeddings(), ids, chunk_size, tables_stay_on_gpu(model))
    arguments = {**moved, "input_ids": None, "inputs_embeds": offload.stream.states}
    token = chunking.OFFLOAD.set(offload)
    try:
        for (buffers, name, _), host in zip(rotary, on_host, strict=True):
            buffers[name] = host
        output = call.signature.forward(**arguments)
        return _with_states(output, lambda states: _returned_to_device(states[:, -kept:], ids.device))
    finally:
        chunking.OFFLOAD.reset(token)
        offload.stream.finish()
        for buffers, name, buffer in rotary:
            buffers[name] = buffer


def _sent_to_host(value: Any) -> Any:
    """A copy in DRAM, page-locked if it comes from a GPU; ready once the compute stream is synchronized."""
    return value.to("cpu", non_blocking=True) if isinstance(value, torch.Tensor) else value


def _returned_to_device(states: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Part of the page-locked hidden states on the GPU, by one copy from page-locked memory."""
    # The part is not contiguous for several rows.
    return (states if states.is_contiguous() else PageLocked.copy_of(states, device).tensor).to(device)


def _rotary_buffers(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Buffers of the modules outside the layers that compute on the device of the hidden states.

    These are rotary embeddings, which may recompute their buffers there. The input embedding, and parts that run in
    chunks, compute on the GPU.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    outside = [
        child for child in model.children()
        if child is not embedding and not isinstance(child, nn.ModuleList | ChunkedModule)
    ]  # fmt: skip
    modules = [module for child in outside for module in child.modules()]
    return [(module._buffers, name, buffer) for module in modules for name, buffer in module._buffers.items()]


def _with_states(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A model's output with its last hidden states replaced by `change` of them."""
    if isinstance(output, ModelOutput):
        output.last_hidden_state = change(output.last_hidden_state)
        return output
    return (change(output[0]), *output[1:])


class _Offload:
    """The forward of a prompt through a model, with its hidden states in DRAM.

    Args:
        embedding: of the model.
        ids: [batch, tokens] on the GPU.
        chunk_size: tokens that are embedded at once.
        keeps_tables: whether arguments along the sequence stay on the GPU, not in DRAM with the states.

    Attributes:
        stream: the hidden states.
    """

    def __init__(self, embedding: nn.Module, ids: torch.Tensor, chunk_size: int, keeps_tables: bool) -> None:
        self.device = ids.device
        self._keeps_tables = keeps_tables
        self._along: dict[int, tuple[torch.Tensor, PageLocked, torch.Tensor]] = {}
        for chunk in chunking.cut(ids.shape[1], chunk_size):
            states = embedding(ids[:, chunk])
            if chunk.start == 0:
                batch, _, width = states.shape
                self.stream = ChunkStream(batch, ids.shape[1], width, states.dtype, chunk_size, self.device)
            self.stream.write(chunk, states)
        self.stream.finish()

    def chunked_pass(
        self, hidden_states: torch.Tensor, kwargs: dict[str, Any], chunk_size: int
    ) -> chunking.ChunkedPass:
        states = self.stream.states
        if hidden_states.shape != states.shape:
            raise UnsupportedModelError(
                f"hidden states have the shape {list(hidden_states.shape)} between layers, but had "
                f"{list(states.shape)} before; set hidden_device to {GPU}"
            )
        if hidden_states.data_ptr() != states.data_ptr():
            states.copy_(hidden_states)  # the model has replaced them
        return _DramPass(self, kwargs, chunk_size)

    def along(self, tensor: torch.Tensor) -> torch.Tensor:
        """An argument along the sequence that every layer gets, in page-locked memory or on the GPU."""
        if id(tensor) not in self._along:
            locked = PageLocked.copy_of(tensor, self.device)
            there = locked.tensor.to(self.device, non_blocking=True) if self._keeps_tables else locked.tensor
            # Keeping the tensor alive ensures that no other tensor gets its id.
            self._along[id(tensor)] = tensor, locked, there
        return self._along[id(tensor)][2]


class _DramPass:
    """A chunked forward over hidden states that are read from DRAM and written back."""

    def __init__(self, offload: _Offload, kwargs: dict[str, Any], chunk_size: int) -> None:
        self._walk, self._kwargs, self._chunk_size = offload, kwargs, chunk_size

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, dict[str, Any]]]:
        stream = self._walk.stream
        chunks = chunking.cut(stream.states.shape[1], self._chunk_size)
        for chunk, (states, kwargs) in zip(chunks, stream.read(chunks, self._along), strict=True):
            current = torch.cuda.current_stream(self._walk.device)
            for tensor in _tensors(kwargs.values()):
                if tensor.is_cuda:
                    tensor.record_stream(current)
            yield chunk, states, kwargs

    def _along(self, chunk: slice) -> dict[str, Any]:
        total = self._walk.stream.states.shape[1]
        return {name: self._sent(name, value, chunk, total) for name, value in self._kwargs.items()}

    def _sent(self, name: str, value: Any, chunk: slice, total: int) -> Any:
        if isinstance(value, tuple | list) and name in chunking.SEQUENCE_DIM:
            return type(value)(self._sent(name, part, chunk, total) for part in value)
        if not isinstance(value, torch.Tensor) or name not in chunking.SEQUENCE_DIM:
            return value
        part = chunking.sliced(name, self._walk.along(value), chunk, total)
        if part.is_cuda:
            return part
        there = torch.empty(part.shape, dtype=part.dtype, device=self._walk.device)
        _copy_by_rows(there, part)
        return there

    def place(self, chunk: slice) -> torch.Tensor | None:
        return None

    def put(self, chunk: slice, result: torch.Tensor) -> None:
        self._walk.stream.write(chunk, result)

    def output(self) -> torch.Tensor:
        # The model's own forward may read the states next.
        self._walk.stream.finish()
        return self._walk.stream.states


def _copy_by_rows(to: torch.Tensor, part: torch.Tensor) -> None:
    """Copy part of a page-locked tensor by contiguous pieces: CUDA would first gather it in pageable memory."""
    if part.is_contiguous():
        to.copy_(part, non_blocking=True)
        return
    for row, part_of_row in zip(to, part, strict=True):
        _copy_by_rows(row, part_of_row)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
