"""The fused decode step of a decoder layer that is an MLP or a mixture of experts alone (Nemotron-H): one kernel.

The path and the wrapped layer get the same random input before the first token, and the path is used only if their
outputs agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter.decoder_form import DecoderForm
from hetero_kv.adapter.feed_forward import FeedForward, feed_forward_of
from hetero_kv.adapter.foreign import PlainTree
from hetero_kv.adapter.fused_decode_layer import TOLERANCE, output_difference
from hetero_kv.adapter.llama_layer import READ_NUMBERS, CopiedFrom, FastPathOwner, agrees
from hetero_kv.adapter.queued_tensor import QueuedTensor, hidden_array, number_of_tokens
from hetero_kv.cpu_ops.kernel_queue import KernelQueue

_TRIED_ROWS = 2
_NO_GATES = np.empty((0, 0), np.float32)


class FusedFeedForwardLayer:
    """The fused decode step of one decoder layer that is an MLP or a mixture; use `of`, which checks its form."""

    def __init__(self, layer: nn.Module, owner: FastPathOwner, form: DecoderForm, feed_forward: FeedForward) -> None:
        self.operator, self._feed_forward = owner, feed_forward
        self._dtype, self._width = form.dtype, len(form.mlp_norm.weight)
        self._tree = PlainTree(layer, READ_NUMBERS)
        self._copied = CopiedFrom([form.mlp_norm.weight, *feed_forward.copied])

    @property
    def is_current(self) -> bool:
        """Whether the layer's modules, hooks, and all copied numbers are unchanged since the path was created."""
        return self._tree.is_unchanged and self._copied.is_unchanged and self._feed_forward.is_current

    @classmethod
    def of(cls, layer: nn.Module, owner: FastPathOwner) -> FusedFeedForwardLayer | None:
        """The fused decode step of a plain decoder layer; None for another form, or if the outputs differ."""
        form = DecoderForm.of_block(layer)
        feed_forward = None if form is None else feed_forward_of(form)
        if form is None or feed_forward is None:
            return None
        path = cls(layer, owner, form, feed_forward)
        return path if agrees(path, layer, TOLERANCE[form.dtype], "the fused feed-forward layer") else None

    def fits(self, hidden_states: torch.Tensor) -> bool:
        """Whether these tokens, one per row, can take the path."""
        rows = number_of_tokens(hidden_states)
        return (
            rows is not None
            and rows <= self._feed_forward.most_rows
            and (type(hidden_states) is QueuedTensor or hidden_states.dtype is self._dtype)
        )

    def __call__(self, hidden_states: torch.Tensor, queue: KernelQueue) -> QueuedTensor:
        """The layer's output for [rows, 1, width]."""
        hidden = hidden_array(hidden_states)
        out = QueuedTensor.empty(hidden, queue)
        nothing = np.empty((len(hidden), 0), hidden.dtype)
        self._feed_forward(queue, hidden, nothing, _NO_GATES, out.array, len(hidden))
        return out

    @torch.no_grad()
    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from the layer's output for random input."""
        # Two experts may be nearly tied for a row of some trial.
        return min(self._difference_from(layer, seed) for seed in range(self._feed_forward.trials))

    def _difference_from(self, layer: Any, seed: int) -> float:
        generator = torch.Generator().manual_seed(layer.layer_idx + (seed << 16))
        hidden = torch.randn(_TRIED_ROWS, 1, self._width, generator=generator).to(self._dtype)
        return output_difference(self(hidden, KernelQueue()).computed(), layer.forward(hidden), hidden)
