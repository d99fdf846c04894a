"""Decode by CUDA graphs: the kernels between two attentions are captured once and launched as one graph.

From token to token, all kernels but those of attention have constant shapes and addresses. The capture of a forward
skips every attention; it yields one segment more than there are attentions. Each later token launches the segments in
turn; between two of them, the cache layers attend with the token's queries, keys and values as without graphs.

The model's Python code runs during the capture only. Code that must run for every token, other than kernel launches, is
therefore refused. Synchronization with the device makes a capture fail, which damages torch's state; an uncaptured
rehearsal token finds it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from hetero_kv.adapter.cache_argument import CACHE_NAMES, as_cache, passed_cache
from hetero_kv.adapter.capture_state import CaptureState
from hetero_kv.adapter.foreign import PlainTree, foreign_part, has_global_hooks
from hetero_kv.adapter.graph_recording import RECORDING, GraphRecording, NotCapturableError, Rehearsal
from hetero_kv.adapter.model_call import ModelCall, Signature
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.errors import is_out_of_memory
from hetero_kv.gpu_ops.graph_segments import GraphSegments
from hetero_kv.gpu_ops.host_traffic import traffic_observed

# Number of uncaptured tokens before the capture: one-time setup runs in the first, and the last of them rehearses the
# capture.
_WARM_UP = 2
# At most this many kinds of call (rows, arguments) stay captured.
_KEPT = 4

_Key = tuple[Any, ...]


class _CapturedToken:
    """The captured forward of one token.

    Args:
        inputs: the input tensors by name; later inputs are copied into them.
        output: of the captured forward.
    """

    def __init__(
        self,
        model: nn.Module,
        segments: GraphSegments,
        recording: GraphRecording,
        inputs: dict[str, torch.Tensor],
        output: Any,
    ) -> None:
        self._segments, self._attentions, self._inputs = segments, recording.attentions, inputs
        self._output = replace(output, **{_cache_field(output): None})
        self._weights = [
            (owner, name)
            for module in model.modules()
            for owner in (module._parameters, module._buffers)
            for name, tensor in owner.items()
            if tensor is not None
        ]
        self._addresses = self._present_addresses()
        self._tree = PlainTree(model, parameters=False)

    def _present_addresses(self) -> list[int]:
        return [-1 if (tensor := owner.get(name)) is None else tensor.data_ptr() for owner, name in self._weights]

    @property
    def is_current(self) -> bool:
        """Whether the model's weights are at the same addresses, and its modules are unmodified."""
        return self._tree.is_unchanged and self._present_addresses() == self._addresses

    def run(self, inputs: dict[str, torch.Tensor], cache: HeteroCache) -> Any:
        """The forward's output for other inputs, over a cache with a step in progress."""
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        for index, (attention, out) in enumerate(self._attentions):
            self._segments.launch(index)
            out.copy_(attention(cache))
        self._segments.launch(len(self._attentions))
        # A copy, because the next token overwrites the captured output.
        last = self._output.last_hidden_state.clone()
        self._segments.launched()
        return replace(self._output, last_hidden_state=last, **{_cache_field(self._output): cache})


class CapturedSteps:
    """The forward of the module that walks through a model's layers, captured for decoded tokens."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], captures: CaptureState) -> None:
        self._model, self._signature, self._captures = model, Signature(forward), captures
        self._tokens: dict[_Key, _CapturedToken] = {}
        self._seen: dict[_Key, int] = {}
        # The reason, by kind of call that cannot be captured.
        self._uncapturable: dict[_Key, str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, by a capture where possible."""
        cache = passed_cache(kwargs)
        if self._captures.is_off or not isinstance(cache, HeteroCache) or not _decodes(cache):
            return self._signature.forward(*args, **kwargs)
        call = self._signature.call(args, kwargs)
        tokens = call.inputs
        leaves_early = cache.depth is not None and cache.depth < len(cache.layers)
        if tokens is None or not tokens.is_cuda or leaves_early:
            return call.run()
        inputs, fixed = self._arguments(call, cache)
        key = _key(inputs, fixed)
        seen = self._seen.setdefault(key, 0)
        if seen < _WARM_UP:
            self._seen[key] += 1
            return self._rehearsed(call, key, inputs, fixed, cache) if seen + 1 == _WARM_UP else call.run()
        token = self._captured(key, inputs, fixed, cache)
        return call.run() if token is None else token.run(inputs, cache)

    def _arguments(self, call: ModelCall, cache: HeteroCache) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors of a call including its positions, and its other arguments without the cache."""
        assert call.inputs is not None
        # The mask of a decoded token only marks rows without a token, which are handled before.
        arguments = {name: value for name, value in call.arguments.items() if name != "attention_mask"}
        if arguments.get("position_ids") is None and "position_ids" in call.signature.names:
            # Filled on the device from scalars, so that nothing is copied to it.
            past = [
                torch.full((len(step.group.sequences), 1), step.past, device=call.inputs.device) for step in cache.steps
            ]
            arguments["position_ids"] = past[0] if len(past) == 1 else torch.cat(past)
        for name in CACHE_NAMES:
            arguments.pop(name, None)
        inputs = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        return inputs, {name: value for name, value in arguments.items() if name not in inputs}

    def _rehearsed(
        self, call: ModelCall, key: _Key, inputs: dict[str, torch.Tensor], fixed: dict[str, Any], cache: HeteroCache
    ) -> Any:
        """Run a call without a capture, and record whether anything in it prevents a capture."""
        try:
            self._require_capturable(inputs, fixed, cache)
        except NotCapturableError:
            return call.run()
        with traffic_observed() as traffic:
            token = RECORDING.set(Rehearsal(cache, traffic))
            try:
                output = self._signature.forward(**inputs, **fixed, **as_cache(self._signature.forward, cache))
            finally:
                RECORDING.reset(token)
        if traffic.first is not None:
            self._uncapturable[key] = f"the forward {traffic.first}"
        return output

    def _captured(
        self, key: _Key, inputs: dict[str, torch.Tensor], fixed: dict[str, Any], cache: HeteroCache
    ) -> _CapturedToken | None:
        """The capture for such a call, made where missing; None where it cannot be captured, or not now."""
        token = self._tokens.get(key)
        if token is not None and token.is_current:
            return token
        if self._captures.backs_off():
            return None
        self._tokens.pop(key, None)
        while len(self._tokens) >= _KEPT:
            del self._tokens[next(iter(self._tokens))]
        try:
            self._require_capturable(inputs, fixed, cache)
            if key in self._uncapturable:
                raise NotCapturableError(self._uncapturable[key])
            self._tokens[key] = self._recorded(inputs, fixed, cache)
        # torch reports a refused capture as a RuntimeError.
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._captures.run_out()
            else:
                self._captures.refuse(str(error).splitlines()[0] if str(error) else type(error).__name__)
            if self._captures.is_off:
                self._tokens.clear()
            return None
        self._captures.succeed()
        return self._tokens[key]

    def _require_capturable(self, inputs: dict[str, torch.Tensor], fixed: dict[str, Any], cache: HeteroCache) -> None:
        """Raise NotCapturableError for obstacles that are known before the capture."""
        others = [layer for layer in cache.steps[0].group.layers if not isinstance(layer, FamilyLayer)]
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
        odd += [name for name, tensor in inputs.items() if not tensor.is_cuda]
        if odd:
            raise NotCapturableError(f"the model is called with {', '.join(odd)}")
        device = next(iter(inputs.values())).device
        if any(parameter.device != device for parameter in self._model.parameters()):
            raise NotCapturableError(f"not all weights are on {device}")

    def _recorded(self, inputs: dict[str, torch.Tensor], fixed: dict[str, Any], cache: HeteroCache) -> _CapturedToken:
        """Capture a token's forward without running its kernels. Raises RuntimeError when that is impossible."""
        inputs_copied = {name: tensor.clone() for name, tensor in inputs.items()}
        segments = GraphSegments(next(iter(inputs.values())).device)
        recording = GraphRecording(segments)
        token = RECORDING.set(recording)
        try:
            with _length_hidden(cache), segments.captured():
                output = self._signature.forward(**inputs_copied, **fixed, **as_cache(self._signature.forward, cache))
        finally:
            RECORDING.reset(token)
        if len(recording.attentions) != len(cache.layers):
            raise NotCapturableError(f"{len(cache.layers)} layers made {len(recording.attentions)} attention calls")
        _require_plain(output)
        return _CapturedToken(self._model, segments, recording, inputs_copied, output)


def _decodes(cache: HeteroCache) -> bool:
    """Whether a step is in progress in which every row of the cache gets one decoded token, which is stored."""
    return bool(cache.steps) and all(step.is_decode and step.tokens == 1 and step.keeps for step in cache.steps)


def _cache_field(output: Any) -> str:
    """The name of the cache in a model's output."""
    return next(field.name for field in fields(output) if field.name in CACHE_NAMES)


def _key(inputs: dict[str, torch.Tensor], fixed: dict[str, Any]) -> _Key:
    shapes = ((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in inputs.items())
    return (*sorted(shapes, key=lambda each: each[0]), *sorted((name, repr(value)) for name, value in fixed.items()))


def _require_plain(output: Any) -> None:
    """Raise NotCapturableError for an output with tensors other than the last hidden states."""
    if not isinstance(output, ModelOutput):
        raise NotCapturableError("the call sets return_dict=False")
    others = [name for name in output if name not in ("last_hidden_state", *CACHE_NAMES)]
    if others:
        raise NotCapturableError(f"the model also returns {', '.join(others)}")


@contextmanager
def _length_hidden(cache: HeteroCache) -> Iterator[None]:
    """Within this context, reading the cache's length is refused, except for a mask.

    The length would be captured, and is wrong at the next token.
    """
    query_offset = cache.get_query_offset

    def refuse(layer_idx: int = 0) -> int:
        raise NotCapturableError("the model reads the number of stored tokens, which changes with every token")

    def offset(layer_idx: int = 0) -> int:
        del cache.__dict__["get_seq_length"]
        try:
            return query_offset(layer_idx)
        finally:
            cache.__dict__["get_seq_length"] = refuse

    cache.__dict__["get_seq_length"], cache.__dict__["get_query_offset"] = refuse, offset
    try:
        yield
    finally:
        del cache.__dict__["get_seq_length"], cache.__dict__["get_query_offset"]
