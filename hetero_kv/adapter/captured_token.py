"""A captured forward of one token, replayed for later tokens."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from hetero_kv.adapter.cache_argument import CACHE_NAMES
from hetero_kv.adapter.foreign import PlainTree
from hetero_kv.adapter.graph_recording import GraphRecording
from hetero_kv.adapter.padded_inputs import put
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.deferred_readback import HostCopy
from hetero_kv.gpu_ops.graph_segments import GraphSegments


class CapturedToken:
    """The captured forward of one token.

    Args:
        inputs: the input tensors by name; later inputs are copied into them.
        output: of the captured forward.
        owner: of the memory whose addresses are captured; None if the capture is valid for any.
        likeliest: `Likeliest.of` the captured logits; None for a forward without them.
    """

    def __init__(
        self,
        model: nn.Module,
        segments: GraphSegments,
        recording: GraphRecording,
        inputs: dict[str, torch.Tensor],
        output: Any,
        owner: Any,
        likeliest: torch.Tensor | None,
    ) -> None:
        self._segments, self._between, self._inputs = segments, recording.between, inputs
        self._prepared, self._owner = recording.prepared, None if owner is None else ref(owner)
        self._likeliest, self._result = likeliest, "last_hidden_state" if likeliest is None else "logits"
        #: Number of the last token that used it.
        self.last = 0
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
        """Whether weights are at the same addresses, modules are unmodified, and the owner still exists."""
        exists = self._owner is None or self._owner() is not None
        return exists and self._tree.is_unchanged and self._present_addresses() == self._addresses

    def run(self, inputs: dict[str, torch.Tensor], cache: HeteroCache) -> Any:
        """The forward's output for other inputs, over a cache with steps in progress."""
        for operator in self._prepared:
            operator.prepare_captured(cache)
        for name, tensor in inputs.items():
            put(name, tensor, self._inputs[name])
        for index, (work, out) in enumerate(self._between):
            self._segments.launch(index)
            result = work(cache)
            if out is not None and result is not None:
                out.copy_(result)
        self._segments.launch(len(self._between))
        batch = cache.required_batch
        rows = batch.sequences
        if self._likeliest is not None and batch.request.likeliest is not None:
            receive = batch.request.likeliest.receive
            # All of it, because a part is no single copy.
            batch.steps[0].host_copies.append(HostCopy(self._likeliest, lambda found: receive(found[:, :rows])))
            output = None
        else:
            # A copy, because the next token overwrites the captured output.
            output = self._output[self._result][:rows].clone()
        self._segments.launched()
        return replace(self._output, **{self._result: output, _cache_field(self._output): cache})


def _cache_field(output: Any) -> str:
    """The name of the cache in a model's output."""
    return next(field.name for field in fields(output) if field.name in CACHE_NAMES)
