"""Decode by CUDA graphs: a token's kernels, or those between two attentions, are captured once and launched together.

From token to token, all kernels but those of attention have constant shapes and addresses. The capture of a forward
skips every attention; it yields one segment more than there are attentions. Each later token launches the segments in
turn; between two of them, the cache layers attend with the token's queries, keys and values as without graphs.

Experts in DRAM end a segment too, because the CPU computes them (`experts_in_dram`).

Where layers attend without the host (`FamilyLayer.captured_memory`), their attention is captured too: its kernels find
the rows' memory by a table on the device. If all layers do, a token is one graph, from its id to the likeliest next
one, for any rows of a bucket (`engine.row_buckets`): sequences come and go, and nothing is captured again. Such a
capture belongs to a store.

The model's Python code runs during the capture only. Code that must run for every token, other than kernel launches, is
therefore refused. Synchronization with the device makes a capture fail, which damages torch's state; an uncaptured
rehearsal token finds it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.utils import ModelOutput

from hetero_kv.adapter.cache_argument import CACHE_NAMES, as_cache, passed_cache
from hetero_kv.adapter.capture_state import CaptureState
from hetero_kv.adapter.captured_token import CapturedToken
from hetero_kv.adapter.foreign import foreign_part, has_global_hooks
from hetero_kv.adapter.graph_recording import (
    GraphRecording,
    NotCapturableError,
    Rehearsal,
    captured_memory,
    recording,
)
from hetero_kv.adapter.model_call import ModelCall, Signature
from hetero_kv.adapter.padded_inputs import padded, padded_rows, padded_shape
from hetero_kv.adapter.quantized_experts import parameters_beside_experts
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.forward_batch import ForwardKind
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.errors import is_out_of_memory
from hetero_kv.gpu_ops.graph_segments import GraphSegments
from hetero_kv.gpu_ops.host_traffic import traffic_observed

# Number of uncaptured tokens before the capture: one-time setup runs in the first, and the last of them rehearses the
# capture.
_WARM_UP = 2
# At most this many kinds of call (rows, arguments), and stores, stay captured.
_KEPT = 8
# A capture with attention replaces one that was not used for this many tokens.
_UNUSED = 64

_Key = tuple[Any, ...]


class _Memory(NamedTuple):
    """The memory that a capture belongs to.

    Attributes:
        owner: of the memory of the layers whose attention is captured; None where no attention is.
        layers: of each layer, whether its attention is captured.
    """

    owner: Any = None
    layers: tuple[bool, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the attention of all layers is captured."""
        return self.owner is not None and all(self.layers)

    @property
    def key(self) -> _Key:
        return () if self.owner is None else (id(self.owner), *self.layers)


_NO_MEMORY = _Memory()


class CapturedSteps:
    """The forward of a model, captured for decoded tokens.

    Args:
        model: the module that walks through the layers, or the whole model around it.
        has_head: whether it is the whole model, which is captured only if its layers' attention is.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], captures: CaptureState, has_head: bool) -> None:
        self._model, self._signature, self._captures, self._has_head = model, Signature(forward), captures, has_head
        self._tokens: dict[_Key, CapturedToken] = {}
        # How many tokens ran uncaptured, by the owner of memory that a capture would belong to, or this object.
        self._seen: WeakKeyDictionary[Any, Counter[_Key]] = WeakKeyDictionary()
        # The reason, by kind of call that cannot be captured.
        self._uncapturable: dict[_Key, str] = {}
        self._count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, by a capture where possible."""
        cache = passed_cache(kwargs)
        if self._captures.is_off or not isinstance(cache, HeteroCache) or not _decodes(cache):
            return self._signature.forward(*args, **kwargs)
        call = self._signature.call(args, kwargs)
        tokens = call.inputs
        leaves_early = cache.depth is not None and cache.depth < cache.number_of_layers
        if tokens is None or not tokens.is_cuda or leaves_early:
            return call.run()
        memory = self._memory(cache)
        if self._has_head and not memory.is_whole:
            return call.run()
        inputs, fixed = self._arguments(call, cache)
        rows = padded_rows(inputs, cache.required_batch.sequences) if memory.is_whole else None
        key = _key(inputs, fixed, rows)
        seen = self._seen.setdefault(memory.owner or self, Counter())
        if seen[key] < _WARM_UP:
            is_last = seen[key] + 1 == _WARM_UP
            output = self._rehearsed(call, key, inputs, fixed, cache) if is_last else call.run()
            # Only now: what a capture needs has been made.
            seen[key] += 1
            return output
        self._count += 1
        token = self._captured(key, inputs, fixed, cache, memory)
        if token is None:
            return call.run()
        token.last = self._count
        return token.run(inputs, cache)

    def _arguments(self, call: ModelCall, cache: HeteroCache) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors of a call including its positions, and its other arguments without the cache.

        The whole model's positions are in page-locked DRAM if the call does not give them: their copy is no launch.
        """
        assert call.inputs is not None
        # The mask of a decoded token only marks rows without a token, which the guard handles.
        arguments = {name: value for name, value in call.arguments.items() if name != "attention_mask"}
        batch, given = cache.required_batch, arguments.get("position_ids")
        # The guard's positions of rows of several lengths are on the device.
        is_given = given is not None and not (self._has_head and any(given is each for each in batch.placed))
        if not is_given and "position_ids" in call.signature.names:
            arguments["position_ids"] = self._positions(cache, call.inputs.device)
        for name in CACHE_NAMES:
            arguments.pop(name, None)
        inputs = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        return inputs, {name: value for name, value in arguments.items() if name not in inputs}

    def _positions(self, cache: HeteroCache, device: torch.device) -> torch.Tensor:
        """The positions of the tokens, [rows, 1]."""
        batch = cache.required_batch
        if self._has_head:
            return torch.tensor(batch.positions)[:, None].pin_memory()
        # Filled on the device from scalars, without a copy from the host.
        past = [torch.full((len(step.group.sequences), 1), step.past, device=device) for step in batch.steps]
        return past[0] if len(past) == 1 else torch.cat(past)

    def _rehearsed(
        self, call: ModelCall, key: _Key, inputs: dict[str, torch.Tensor], fixed: dict[str, Any], cache: HeteroCache
    ) -> Any:
        """Run a call without a capture, and record whether anything in it prevents a capture."""
        try:
            self._require_capturable(inputs, fixed, cache)
        except NotCapturableError:
            return call.run()
        with traffic_observed() as traffic:
            rehearsal = Rehearsal(cache, traffic)
            with traffic.unobserved():
                inputs = _on_device(inputs)
            with cache.recorded_by(rehearsal), recording(rehearsal):
                output = self._signature.forward(**inputs, **fixed, **as_cache(self._signature.forward, cache))
        if traffic.first is not None:
            self._uncapturable[key] = f"the forward {traffic.first}"
        return output

    def _captured(
        self, key: _Key, inputs: dict[str, torch.Tensor], fixed: dict[str, Any], cache: HeteroCache, memory: _Memory
    ) -> CapturedToken | None:
        """The capture for such a call, created if missing; None if it cannot be captured, or not now."""
        kind = key
        if self._has_head and kind in self._uncapturable:
            return None
        if memory.owner is not None and not self._has_place((*kind, memory.key)):
            memory = _NO_MEMORY
        key = (*kind, memory.key)
        token = self._tokens.get(key)
        if token is not None and token.is_current:
            return token
        if self._captures.backs_off():
            return None
        self._tokens = {other: each for other, each in self._tokens.items() if other != key and each.is_current}
        while len(self._tokens) >= _KEPT:
            del self._tokens[min(self._tokens, key=lambda other: self._tokens[other].last)]
        try:
            self._require_capturable(inputs, fixed, cache)
            if kind in self._uncapturable:
                raise NotCapturableError(self._uncapturable[kind])
            self._tokens[key] = self._recorded(inputs, fixed, cache, memory)
        # torch reports a refused capture as a RuntimeError.
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if is_out_of_memory(error):
                self._captures.run_out()
            elif self._has_head:
                # The layers are captured by themselves.
                self._uncapturable[kind] = reason
            else:
                self._captures.refuse(reason)
            if self._captures.is_off:
                self._tokens.clear()
            return None
        self._captures.succeed()
        return self._tokens[key]

    def _memory(self, cache: HeteroCache) -> _Memory:
        """The memory that a capture with attention would belong to; none if no layer's attention can be captured."""
        layers = [captured_memory(cache, index) for index in range(len(cache.layers))]
        owners = {id(layer): layer for layer in layers if layer is not None}
        if len(owners) != 1:
            return _NO_MEMORY
        ((_, owner),) = owners.items()
        return _Memory(owner, tuple(layer is not None for layer in layers))

    def _has_place(self, key: _Key) -> bool:
        """Whether a capture with attention exists, or may replace another.

        It may not if more stores take turns than captures are kept: all would be captured again and again.
        """
        if key in self._tokens or len(self._tokens) < _KEPT:
            return True
        return any(self._count - each.last > _UNUSED or not each.is_current for each in self._tokens.values())

    def _require_capturable(self, inputs: dict[str, torch.Tensor], fixed: dict[str, Any], cache: HeteroCache) -> None:
        """Raise NotCapturableError for obstacles that are known before the capture."""
        others = [layer for layer in cache.required_batch.steps[0].group.layers if not isinstance(layer, FamilyLayer)]
        if others:
            raise NotCapturableError(
                f"{len(others)} layers use a cache of transformers' own ({type(others[0]).__name__})"
            )
        if has_global_hooks():
            raise NotCapturableError("torch calls global hooks for every module")
        for path, module in self._model.named_modules():
            if (part := foreign_part(module)) is not None:
                raise NotCapturableError(f"{path or type(module).__name__} has {part}")
        if "position_ids" not in inputs:
            raise NotCapturableError(f"{type(self._model).__name__} takes no position_ids")
        odd = [name for name, value in fixed.items() if not isinstance(value, bool | int | float | str | None)]
        odd += [name for name, tensor in inputs.items() if not tensor.is_cuda and name != "position_ids"]
        if odd:
            raise NotCapturableError(f"the model is called with {', '.join(odd)}")
        device = _device_of(inputs)
        if any(parameter.device != device for parameter in parameters_beside_experts(self._model)):
            raise NotCapturableError(f"not all weights are on {device}")

    def _recorded(
        self, inputs: dict[str, torch.Tensor], fixed: dict[str, Any], cache: HeteroCache, memory: _Memory
    ) -> CapturedToken:
        """Capture a token's forward without running its kernels. Raises RuntimeError when that is impossible."""
        rows = padded_rows(inputs, cache.required_batch.sequences) if memory.is_whole else None
        inputs_copied = {name: tensor.clone() for name, tensor in _on_device(inputs).items()}
        if rows is not None:
            inputs_copied = {name: padded(name, tensor, rows) for name, tensor in inputs_copied.items()}
        segments, likeliest = GraphSegments(_device_of(inputs)), None
        graph = GraphRecording(segments, None if memory.owner is None else cache)
        with cache.recorded_by(graph), recording(graph), segments.captured():
            output = self._signature.forward(**inputs_copied, **fixed, **as_cache(self._signature.forward, cache))
            _require_plain(output, "logits" if self._has_head else "last_hidden_state")
            if self._has_head:
                likeliest = Likeliest.of(output.logits[:, -1])
        if graph.attentions != len(cache.layers):
            raise NotCapturableError(f"{len(cache.layers)} layers made {graph.attentions} attention calls")
        return CapturedToken(self._model, segments, graph, inputs_copied, output, memory.owner, likeliest)


def _decodes(cache: HeteroCache) -> bool:
    """Whether the forward stores one decoded token of every sequence, and is not part of another one's recording."""
    batch = cache.batch
    if batch is None or batch.recording is not None:
        return False
    return batch.kind is ForwardKind.DECODE and batch.request.stores


def _key(inputs: dict[str, torch.Tensor], fixed: dict[str, Any], rows: int | None) -> _Key:
    """A kind of call; rows: those that it is captured with, None for its own."""
    shapes = ((name, padded_shape(name, each, rows), each.dtype, each.device) for name, each in inputs.items())
    return (*sorted(shapes, key=lambda each: each[0]), *sorted((name, repr(value)) for name, value in fixed.items()))


def _device_of(inputs: dict[str, torch.Tensor]) -> torch.device:
    """The GPU that a call's tensors are on, or are copied to."""
    return next(tensor.device for tensor in inputs.values() if tensor.is_cuda)


def _on_device(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The input tensors, copied to the GPU if necessary."""
    device = _device_of(inputs)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def _require_plain(output: Any, result: str) -> None:
    """Raise NotCapturableError for an output with tensors other than `result`."""
    if not isinstance(output, ModelOutput):
        raise NotCapturableError("the call sets return_dict=False")
    others = [name for name in output if name not in (result, *CACHE_NAMES)]
    if others:
        raise NotCapturableError(f"the model also returns {', '.join(others)}")
