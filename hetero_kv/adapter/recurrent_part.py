"""A decoder layer's recurrent mixer and what follows it, for decoded tokens: two kernels in the forward's queue.

The mixer's step (`recurrent_form.RecurrentStep`) updates the state in the cache; `feed_forward` computes the rest: the
output projection, and an MLP or a mixture if the layer has one. A mixer may be beside attention (Falcon-H1); then the
rest is the projection alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from hetero_kv.adapter.decoder_form import DecoderForm, applied_norm, factor_of
from hetero_kv.adapter.feed_forward import FeedForward, feed_forward_of
from hetero_kv.adapter.recurrent import mixer_output
from hetero_kv.adapter.recurrent_form import RecurrentStep, recurrent_step
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.cpu_ops.recurrent_steps import columns_at
from hetero_kv.engine.recurrent_state import fork, is_state
from hetero_kv.weights.kernel_arrays import NAMES

#: The names of a layer's parts: norm, mixer, the MLP's norm, MLP, and an MLP beside it that all tokens take.
_LAYERS = (
    ("operator_norm", "conv", "ffn_norm", "feed_forward"),
    ("input_layernorm", "linear_attn", "post_attention_layernorm", "mlp"),
    # Bamba and Jamba.
    ("input_layernorm", "mamba", "pre_ff_layernorm", "feed_forward"),
    # Granite 4.
    ("input_layernorm", "mamba", "post_attention_layernorm", "shared_mlp"),
    ("input_layernorm", "mamba", "post_attention_layernorm", "block_sparse_moe", "shared_mlp"),
    # Nemotron-H.
    ("norm", "mixer"),
)
_NO_GATES = np.empty((0, 0), np.float32)


class RecurrentPart:
    """A recurrent mixer's step and what follows it.

    Attributes:
        mixer, norm: the module, and the norm of its input.
        layer_idx: the mixer's.
        most_rows: the largest number of tokens that it takes, one per row.
        copied: tensors of which it has copies.
        step, feed_forward: its two kernels.
    """

    def __init__(self, form: DecoderForm, step: RecurrentStep, feed_forward: FeedForward) -> None:
        self.mixer, self.norm, self.step, self.feed_forward = form.attention, form.norm, step, feed_forward
        self.layer_idx: int = form.attention.layer_idx
        self.most_rows = min(step.most_rows, feed_forward.most_rows)
        output = form.projections[-1]
        #: The index of the mixer's output for each column of the packed output projection; None for the same order.
        self._inputs = None if output.inputs is None else output.inputs.numpy().astype(np.int64)
        biases = [] if output.bias is None else [output.bias]
        self.copied = [*(norm.weight for norm in form.norms), *biases, *step.copied, *feed_forward.copied]

    @classmethod
    def of(cls, layer: nn.Module) -> RecurrentPart | None:
        """A decoder layer with a recurrent mixer alone; None for another form."""
        if any(parameter.device.type != "cpu" for parameter in layer.parameters()):
            return None
        parts: dict[str, Any] = dict(layer.named_children())
        names = next((each for each in _LAYERS if parts.keys() == set(each)), None)
        if names is None:
            return None
        norm, mixer, mlp_norm, mlp, shared = [*(parts[name] for name in names), None, None, None][:5]
        norms = [applied_norm(each) for each in (norm, mlp_norm) if each is not None]
        if not all(weight.size for weight, _ in norms) or len({epsilon for _, epsilon in norms}) > 1:
            return None
        factor = factor_of(layer, "residual_multiplier")
        return cls._made(
            DecoderForm(
                attention=mixer, norm=norm, mlp_norm=mlp_norm, mlp=mlp, shared=shared, factor=factor, mlp_factor=factor
            )
        )

    @classmethod
    def beside(cls, form: DecoderForm) -> RecurrentPart | None:
        """The mixer beside a layer's attention; None for another form."""
        return cls._made(DecoderForm(attention=form.beside, norm=form.norm, factor=form.beside_factor))

    @classmethod
    def _made(cls, form: DecoderForm) -> RecurrentPart | None:
        step = recurrent_step(form.norm, form.attention)
        if step is None:
            return None
        form = replace(form, projections=(form.attention.out_proj,))
        feed_forward = feed_forward_of(form)
        return None if feed_forward is None else cls(form, step, feed_forward)

    def fits(self, layer: Any) -> bool:
        """Whether it can take tokens behind the state in a cache's layer."""
        return (
            is_state(layer)
            and not layer.record_past
            and bool(layer.has_previous_state.get(0))
            and self.step.states(layer) is not None
        )

    def __call__(self, queue: KernelQueue, hidden: np.ndarray, layer: Any, out: np.ndarray) -> None:
        """Queue the kernels that write the output for `hidden` [rows, width] to `out`, and update the state in `layer`.

        See `fits`.
        """
        states = self.step.states(layer)
        assert states is not None
        mixed = np.empty((len(hidden), self.step.inner), hidden.dtype)
        self.step(queue, hidden, states, mixed)
        if self._inputs is not None:
            ordered = np.empty((len(hidden), len(self._inputs)), hidden.dtype)
            queue.add(columns_at(NAMES[hidden.dtype]), mixed, self._inputs, ordered)
            mixed = ordered
        self.feed_forward(queue, hidden, mixed, _NO_GATES, out, len(hidden))


class MixerInTrial(nn.Module):
    """Replaces the mixer beside attention in a trial of the layer: it has a state of its own, behind random tokens.

    Attributes:
        state: that the module's forward updates.
        before: the same state before that.
    """

    def __init__(self, mixer: Any, hidden: torch.Tensor) -> None:
        super().__init__()
        self._mixer, self.state = [mixer], LinearAttentionLayer(1)
        mixer_output(mixer, hidden, self.state)
        self.before = fork(self.state)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """The mixer's output; the cache and the mask among the other arguments are the trial's, and empty."""
        return mixer_output(self._mixer[0], hidden_states, self.state)
