"""The fused decode step of a decoder layer with a recurrent mixer: two kernels per token (`RecurrentPart`).

The path and the wrapped layer get the same random input and state before the first token, and the path is used only if
their outputs and states agree.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from hetero_kv.adapter.cache_argument import as_cache
from hetero_kv.adapter.foreign import PlainTree
from hetero_kv.adapter.fused_decode_layer import TOLERANCE, output_difference
from hetero_kv.adapter.llama_layer import READ_NUMBERS, CopiedFrom, FastPathOwner, agrees, as_embeddings, parted
from hetero_kv.adapter.queued_tensor import QueuedTensor, hidden_array, number_of_tokens
from hetero_kv.adapter.recurrent_part import RecurrentPart
from hetero_kv.adapter.recurrent_prompt import MixerForward, states_difference
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.engine.recurrent_state import fork

# The trial: tokens before the step.
_BEFORE, _FIRST_PART, _TRIED_ROWS = 5, 3, 2


class FusedRecurrentLayer:
    """The fused decode step of one decoder layer whose mixer is recurrent; use `of`, which checks the layer's form."""

    def __init__(self, layer: nn.Module, owner: FastPathOwner, part: RecurrentPart) -> None:
        self.operator, self.layer_idx, self._part = owner, part.layer_idx, part
        self._dtype = part.norm.weight.dtype
        # What follows the output in a tuple, according to the trial; None for no tuple.
        self._behind: tuple[None, ...] | None = None
        self._tree = PlainTree(layer, READ_NUMBERS)
        self._copied = CopiedFrom(part.copied, part.step.views)

    @property
    def mixer_forward(self) -> MixerForward | None:
        """The mixer's forward for prompts; None if it has none of its own."""
        return self._part.step.prompt

    @property
    def is_current(self) -> bool:
        """Whether the layer's modules, hooks, and all copied numbers are unchanged since the path was created."""
        return self._tree.is_unchanged and self._copied.is_unchanged and self._part.feed_forward.is_current

    @classmethod
    def of(cls, layer: nn.Module, owner: FastPathOwner) -> FusedRecurrentLayer | None:
        """The fused decode step of a plain decoder layer; None for another form, or if outputs or states differ."""
        part = RecurrentPart.of(layer)
        if part is None:
            return None
        path = cls(layer, owner, part)
        return path if agrees(path, layer, TOLERANCE[path._dtype], "the fused recurrent layer") else None

    def fits(self, hidden_states: torch.Tensor, cache: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether these tokens, one per row, can take the path after the state in the cache."""
        rows = number_of_tokens(hidden_states)
        return (
            rows is not None
            and (type(hidden_states) is QueuedTensor or hidden_states.dtype is self._dtype)
            and rows <= self._part.most_rows
            and kwargs.get("attention_mask") is None
            and self._part.fits(cache.layers[self.layer_idx])
        )

    def __call__(self, hidden_states: torch.Tensor, cache: Any, queue: KernelQueue) -> QueuedTensor | tuple[Any, ...]:
        """The layer's output for [rows, 1, width], or a tuple that begins with it.

        The queue also updates the state in the cache.
        """
        hidden = hidden_array(hidden_states)
        out = QueuedTensor.empty(hidden, queue)
        self._part(queue, hidden, cache.layers[self.layer_idx], out.array)
        return out if self._behind is None else (out, *self._behind)

    @torch.no_grad()
    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from the layer's output and state after random tokens."""
        trials = (self._differences_from(layer, seed) for seed in range(self._part.feed_forward.trials))
        states, outputs = zip(*trials, strict=True)
        # Two experts may be nearly tied for a row of some trial.
        return max(*states, min(outputs))

    def _differences_from(self, layer: Any, seed: int) -> tuple[float, float]:
        """The differences of the states, and of the output."""
        generator = torch.Generator().manual_seed(self.layer_idx + (seed << 16))
        hidden = torch.randn(_TRIED_ROWS, _BEFORE + 1, len(self._part.norm.weight), generator=generator)
        hidden = hidden.to(self._dtype)
        theirs = LinearAttentionLayer(1)
        _called(layer, hidden[:, :_BEFORE], theirs, self.layer_idx)
        mine = fork(theirs)
        token = hidden[:, _BEFORE:]
        expected, self._behind = _called(layer, token, theirs, self.layer_idx)
        cache = Cache(layers=[mine] * (self.layer_idx + 1))
        if not self.fits(token, cache, {}):
            return float("inf"), float("inf")
        output = parted(self(token, cache, KernelQueue()))[0].computed()
        states = states_difference(mine, theirs)
        prompt = self._part.step.prompt
        if prompt is not None:
            states = max(states, prompt.difference_from_module(hidden, _FIRST_PART))
        return states, output_difference(output, expected, token)


def _called(
    layer: Any, hidden_states: torch.Tensor, state: LinearAttentionLayer, layer_idx: int
) -> tuple[Any, tuple[None, ...] | None]:
    """A layer's output for [rows, tokens, width] after `state`, which the call updates; see `parted`."""
    # A copy: other threads may use this layer meanwhile.
    copied = copy.copy(layer)
    cache = Cache(layers=[state] * (layer_idx + 1))
    output = copied.forward(
        hidden_states, attention_mask=None, **as_embeddings(copied.forward, None), **as_cache(copied.forward, cache)
    )
    return parted(output)
