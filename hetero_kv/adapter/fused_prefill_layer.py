"""The fused prompt chunk of a decoder layer of Llama's form: fewer passes over memory.

Besides its matrix products, such a layer takes some 25 passes over a chunk's numbers: norms, rotations, the gate,
residuals, each a torch call that reads and writes all of them. `cpu_ops.fused_prefill_layer` takes five, and rounds at
the same points as the layer. The projections are the layer's own modules, so weights of any storage type work.
Equivalence is tested: before the first prompt the path and the wrapped layer get the same random input, and the path is
used only if their outputs agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter import bridge
from hetero_kv.adapter.foreign import foreign_part, has_global_hooks, has_own_hooks
from hetero_kv.adapter.llama_layer import (
    GATES,
    HEAD_NORMS,
    MLP,
    PROJECTIONS,
    Trial,
    agrees,
    has_llama_form,
    largest_difference,
    norm_of,
)
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.cpu_ops import fused_prefill_layer
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.weights.kernel_arrays import bits

#: Largest relative difference (of norms) from the wrapped layer: sums in another order may round differently, and so
#: may numbers that are quantized from them.
_TOLERANCE = 2e-3
_TRIED = 2, 3


def _go_on() -> None:
    """No pause."""


def is_plain_but_for_projections(layer: nn.Module) -> bool:
    """Whether a decoder layer has no foreign part outside its projections, which are called as modules.

    Hooks within projections are not allowed either: the projections' outputs are overwritten.
    """
    if has_global_hooks():
        return False
    projections = {*PROJECTIONS, *MLP}
    remaining: list[tuple[nn.Module, bool]] = [(layer, False)]
    while remaining:
        module, is_called = remaining.pop()
        if has_own_hooks(module) if is_called else foreign_part(module) is not None:
            return False
        remaining += [
            (child, is_called or name in projections) for name, child in module._modules.items() if child is not None
        ]
    return True


class FusedPrefillLayer:
    """The fused prompt chunk of one decoder layer.

    Args:
        layer: the decoder layer, its attention replaced by `operator`.

    Use `of`, which checks the layer's form.
    """

    def __init__(self, layer: Any, operator: AttentionOperator) -> None:
        attention: Any = operator.wrapped
        self.operator, self._attention = operator, attention
        self._dim: int = attention.head_dim
        self._gate, self._up, self._down = (getattr(layer.mlp, name) for name in MLP)
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norms = [getattr(attention, name, None) for name in HEAD_NORMS]
        self._activation = GATES[type(layer.mlp.act_fn).__name__]
        self.call_settings: tuple[float, float | None, int | None, Any] = (0.0, None, None, None)

    @classmethod
    def of(cls, layer: Any, operator: Any) -> FusedPrefillLayer | None:
        """The fused prompt chunk of a decoder layer; None when the layer has another form, or the outputs differ."""
        if not has_llama_form(layer, operator):
            return None
        fast_path = cls(layer, operator)
        return fast_path if agrees(fast_path, layer, _TOLERANCE, "the fused prefill layer", logging.INFO) else None

    def fits(self, hidden_states: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
        """Whether these tokens, of a model on a CPU, can take the path."""
        embeddings = kwargs.get("position_embeddings")
        return (
            hidden_states.dtype is self._norms[0].weight.dtype
            and isinstance(embeddings, tuple)
            and embeddings[0].shape[-1] == self._dim
            and embeddings[0].dtype is hidden_states.dtype
            and kwargs.get("attention_mask") is None
            and not bridge.changes_attention(kwargs)
            # The path has no dropout.
            and not self.operator.training
        )

    def __call__(
        self, hidden_states: torch.Tensor, cache: Any, kwargs: Mapping[str, Any], out: torch.Tensor, last: int
    ) -> torch.Tensor:
        """Write the layer's output for [batch, tokens, width] to `out`, which may be the input itself.

        Args:
            last: number of last tokens to compute; `out` is unchanged at the others.
        """
        normed = self._normed(hidden_states)
        if self.operator.changes_arguments:
            kwargs = self.operator.arguments_for((), {**kwargs, "hidden_states": normed})
        pause = cache.required_batch.request.pause or _go_on
        call = self._call(normed, kwargs["position_embeddings"])
        pause()
        attended = self.operator.attend(cache, call)
        pause()
        if last:
            first = hidden_states.shape[1] - last
            self._output(hidden_states[:, first:], attended[:, :, first:], out[:, first:], pause)
        return out

    def found(self) -> Any:
        """See `KeptFastPath`."""
        return list(self.call_settings[:3])

    def take(self, found: Any) -> None:
        """See `KeptFastPath`."""
        scale, softcap, window = found
        self.call_settings = (scale, softcap, window, None)

    @torch.no_grad()
    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from the layer's output for random input."""
        trial = Trial.of(layer, self.operator, *_TRIED)
        reference, embeddings = trial.call, trial.embeddings
        if reference is None or embeddings is None or reference.sink is not None or trial.behind is not None:
            return float("inf")
        self.call_settings = (reference.scale, reference.softcap, reference.sliding_window, None)
        call = self._call(self._normed(trial.hidden), embeddings)
        mine = call.q, call.k, call.v, self._output(trial.hidden, trial.attended)
        return largest_difference(mine, (reference.q, reference.k, reference.v, trial.output))

    def _normed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The input of the attention module, [batch, tokens, width]."""
        normed = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        weight, epsilon = norm_of(self._norms[0])
        fused_prefill_layer.norm_rows(_rows(hidden_states), None, weight, epsilon, _rows(normed), _threads())
        return normed

    def _call(self, normed: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]) -> bridge.AttentionCall:
        """The layer's call of its attention function."""
        attention = self._attention
        cos, sin = (_rows(each) for each in embeddings)
        q, k, v = (_made(project, normed) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
        for rotated, norm in zip((q, k), self._head_norms, strict=True):
            weight, epsilon = norm_of(norm)
            normed_by = weight if weight.size else None
            fused_prefill_layer.rotate_heads(_rows(rotated), cos, sin, normed_by, epsilon, _threads())
        q, k, v = (each.unflatten(2, (-1, self._dim)).transpose(1, 2) for each in (q, k, v))
        return bridge.AttentionCall(q, k, v, *self.call_settings)

    def _output(
        self, hidden_states: torch.Tensor, attended: torch.Tensor, out: torch.Tensor | None = None,
        pause: Callable[[], None] = _go_on,
    ) -> torch.Tensor:  # fmt: skip
        """The layer's output from its input [batch, tokens, width] and its attention's [batch, heads, tokens, dim]."""
        between = _made(self._attention.o_proj, attended.transpose(1, 2).flatten(2))
        normed = torch.empty_like(between)
        weight, epsilon = norm_of(self._norms[1])
        # This adds the layer's input to `between`, in place: the residual of the sum below.
        before = _rows(hidden_states)
        fused_prefill_layer.norm_rows(_rows(between), before, weight, epsilon, _rows(normed), _threads())
        gate = _made(self._gate, normed)
        pause()
        up = _made(self._up, normed)
        pause()
        fused_prefill_layer.gate_rows(_rows(gate), _rows(up), self._activation, _threads())
        return torch.add(between, self._down(gate).detach(), out=between if out is None else out)


def _made(projection: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output of a projection, in a buffer that kernels may overwrite."""
    made = projection(x).detach().to(x.dtype).contiguous()
    # Foreign modules may keep a reference to their output.
    return made if foreign_part(projection) is None else made.clone()


def _rows(tensor: torch.Tensor) -> np.ndarray:
    """[..., columns] as a kernel argument [rows, columns]: the same memory where the tensor is contiguous."""
    return bits(tensor.detach().contiguous().view(-1, tensor.shape[-1]))


def _threads() -> int:
    return at_most(torch.get_num_threads())
