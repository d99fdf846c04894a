"""The fused decode step of a decoder layer with a recurrent mixer: two kernels per token, in the forward's queue.

The mixer's step (`recurrent_form.RecurrentStep`) updates the state in the cache; `feed_forward` computes the rest. The
path and the wrapped layer get the same random input and state before the first token, and the path is used only if
their outputs and states agree.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from hetero_kv.adapter.cache_argument import as_cache
from hetero_kv.adapter.decoder_form import DecoderForm
from hetero_kv.adapter.feed_forward import FeedForward, feed_forward_of
from hetero_kv.adapter.foreign import PlainTree
from hetero_kv.adapter.fused_decode_layer import TOLERANCE, output_difference
from hetero_kv.adapter.llama_layer import READ_NUMBERS, CopiedFrom, FastPathOwner, agrees, parted
from hetero_kv.adapter.queued_tensor import QueuedTensor, hidden_array, number_of_tokens
from hetero_kv.adapter.recurrent_form import RecurrentStep, recurrent_form
from hetero_kv.adapter.recurrent_prompt import MixerForward, states_difference
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.cpu_ops.recurrent_steps import columns_at
from hetero_kv.engine.recurrent_state import fork, is_state
from hetero_kv.weights.kernel_arrays import NAMES

# The trial: tokens before the step.
_BEFORE, _FIRST_PART, _TRIED_ROWS = 5, 3, 2
_NO_GATES = np.empty((0, 0), np.float32)


class FusedRecurrentLayer:
    """The fused decode step of one decoder layer whose mixer is recurrent; use `of`, which checks the layer's form."""

    def __init__(
        self, layer: nn.Module, owner: FastPathOwner, form: DecoderForm, step: RecurrentStep, feed_forward: FeedForward
    ) -> None:
        self.operator = owner
        self.layer_idx: int = form.attention.layer_idx
        self._norm, self._mixer = form.norm, form.attention
        inputs = form.projections[-1].inputs
        #: The index of the mixer's output for each column of the packed output projection; None for the same order.
        self._inputs = None if inputs is None else inputs.numpy().astype(np.int64)
        self._step, self._feed_forward = step, feed_forward
        self._most_rows = min(step.most_rows, feed_forward.most_rows)
        # What follows the output in a tuple, according to the trial; None for no tuple.
        self._behind: tuple[None, ...] | None = None
        self._tree = PlainTree(layer, READ_NUMBERS)
        norms = [norm.weight for norm in form.norms]
        outputs = [bias for bias in (form.projections[-1].bias,) if bias is not None]
        self._copied = CopiedFrom([*norms, *outputs, *step.copied, *feed_forward.copied], step.views)

    @property
    def mixer_forward(self) -> MixerForward | None:
        """The mixer's forward for prompts; None if it has none of its own."""
        return self._step.prompt

    @property
    def is_current(self) -> bool:
        """Whether the layer's modules, hooks, and all copied numbers are unchanged since the path was created."""
        return self._tree.is_unchanged and self._copied.is_unchanged and self._feed_forward.is_current

    @classmethod
    def of(cls, layer: nn.Module, owner: FastPathOwner) -> FusedRecurrentLayer | None:
        """The fused decode step of a plain decoder layer; None for another form, or if outputs or states differ."""
        found = recurrent_form(layer)
        feed_forward = None if found is None else feed_forward_of(found[0])
        if found is None or feed_forward is None:
            return None
        path = cls(layer, owner, *found, feed_forward)
        return path if agrees(path, layer, TOLERANCE[path._norm.weight.dtype], "the fused recurrent layer") else None

    def fits(self, hidden_states: torch.Tensor, cache: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether these tokens, one per row, can take the path after the state in the cache."""
        layer, rows = cache.layers[self.layer_idx], number_of_tokens(hidden_states)
        return (
            rows is not None
            and (type(hidden_states) is QueuedTensor or hidden_states.dtype is self._norm.weight.dtype)
            and rows <= self._most_rows
            and kwargs.get("attention_mask") is None
            and is_state(layer)
            and not layer.record_past
            and bool(layer.has_previous_state.get(0))
            and self._step.states(layer) is not None
        )

    def __call__(self, hidden_states: torch.Tensor, cache: Any, queue: KernelQueue) -> QueuedTensor | tuple[Any, ...]:
        """The layer's output for [rows, 1, width], or a tuple that begins with it.

        The queue also updates the state in the cache.
        """
        states = self._step.states(cache.layers[self.layer_idx])
        assert states is not None
        hidden = hidden_array(hidden_states)
        mixed = np.empty((len(hidden), self._step.inner), hidden.dtype)
        self._step(queue, hidden, states, mixed)
        if self._inputs is not None:
            ordered = np.empty((len(hidden), len(self._inputs)), hidden.dtype)
            queue.add(columns_at(NAMES[hidden.dtype]), mixed, self._inputs, ordered)
            mixed = ordered
        out = QueuedTensor.empty(hidden, queue)
        self._feed_forward(queue, hidden, mixed, _NO_GATES, out.array, len(hidden))
        return out if self._behind is None else (out, *self._behind)

    @torch.no_grad()
    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from the layer's output and state after random tokens."""
        trials = (self._differences_from(layer, seed) for seed in range(self._feed_forward.trials))
        states, outputs = zip(*trials, strict=True)
        # Two experts may be nearly tied for a row of some trial.
        return max(*states, min(outputs))

    def _differences_from(self, layer: Any, seed: int) -> tuple[float, float]:
        """The differences of the states, and of the output."""
        weight = self._norm.weight
        generator = torch.Generator().manual_seed(self.layer_idx + (seed << 16))
        hidden = torch.randn(_TRIED_ROWS, _BEFORE + 1, len(weight), generator=generator).to(weight.dtype)
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
        if self._step.prompt is not None:
            states = max(states, self._step.prompt.difference_from_module(hidden, _FIRST_PART))
        return states, output_difference(output, expected, token)


def _called(
    layer: Any, hidden_states: torch.Tensor, state: LinearAttentionLayer, layer_idx: int
) -> tuple[Any, tuple[None, ...] | None]:
    """A layer's output for [rows, tokens, width] after `state`, which the call updates; see `parted`."""
    # A copy: other threads may use this layer meanwhile.
    copied = copy.copy(layer)
    cache = Cache(layers=[state] * (layer_idx + 1))
    output = copied.forward(
        hidden_states, position_embeddings=None, attention_mask=None, **as_cache(copied.forward, cache)
    )
    return parted(output)
