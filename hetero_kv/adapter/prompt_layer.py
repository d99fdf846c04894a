"""A decoder layer's way for a prompt's chunk in fewer passes over memory, where the layer has a form that is known.

Beside its products a layer of Llama's form takes some 25 passes over a chunk's numbers, each a call of torch that
reads and writes all of them: norms, rotations, the gate, residuals. `cpu_ops.prompt_layer` takes five, and rounds where
the layer does. Projections are the layer's own modules, and so are weights, whatever they are kept as. That the rest is
the same is not believed but tried: before its first prompt the way and the wrapped layer are given the same random
input, and the way is used only where they agree.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from cpu_ops import prompt_layer
from cpu_ops.threads import at_most
from hetero_kv.adapter import bridge
from hetero_kv.adapter.foreign import foreign_part, has_global_hooks, is_heard_itself
from hetero_kv.adapter.kernel_arrays import bits
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

#: Largest relative difference (of norms) from the wrapped layer: a sum in another order may be rounded to the other
#: side, and so may what is quantised from it.
_TOLERANCE = 2e-3
_TRIED = 2, 3


def is_plain_but_for_projections(layer: nn.Module) -> bool:
    """Whether nothing foreign is in a decoder layer but in the way its projections are computed, which are called.

    Nobody may listen within projections: what they give is written over.
    """
    if has_global_hooks():
        return False
    projections = {*PROJECTIONS, *MLP}
    remaining: list[tuple[nn.Module, bool]] = [(layer, False)]
    while remaining:
        module, is_called = remaining.pop()
        if is_heard_itself(module) if is_called else foreign_part(module) is not None:
            return False
        remaining += [
            (child, is_called or name in projections) for name, child in module._modules.items() if child is not None
        ]
    return True


class PromptLayer:
    """The way of one decoder layer.

    Args:
        layer: the decoder layer, its attention replaced by `operator`.

    Use `of`, which knows whether a layer has the form.
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
    def of(cls, layer: Any, operator: Any) -> PromptLayer | None:
        """The way of a decoder layer; None where the layer has another form, or the way gives something else."""
        if not has_llama_form(layer, operator):
            return None
        way = cls(layer, operator)
        return way if agrees(way, layer, _TOLERANCE, "the short way of prompts", logging.INFO) else None

    def fits(self, hidden_states: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
        """Whether these tokens, of a model on a CPU, can take the way."""
        embeddings = kwargs.get("position_embeddings")
        return (
            hidden_states.dtype is self._norms[0].weight.dtype
            and isinstance(embeddings, tuple)
            and embeddings[0].shape[-1] == self._dim
            and embeddings[0].dtype is hidden_states.dtype
            and kwargs.get("attention_mask") is None
            and not bridge.changes_attention(kwargs)
            # Dropout is the layer's own matter.
            and not self.operator.training
        )

    def __call__(
        self, hidden_states: torch.Tensor, cache: Any, kwargs: Mapping[str, Any], out: torch.Tensor, asked: int
    ) -> torch.Tensor:
        """The layer's output for [batch, tokens, width], written to `out`, which may be the input itself.

        asked: of how many last tokens; `out` stays as it is at the others.
        """
        normed = self._normed(hidden_states)
        if self.operator.changes_arguments:
            kwargs = self.operator.arguments_for((), {**kwargs, "hidden_states": normed})
        call = self._call(normed, kwargs["position_embeddings"])
        attended = self.operator.attend(cache, call)
        if asked:
            first = hidden_states.shape[1] - asked
            self._output(hidden_states[:, first:], attended[:, :, first:], out[:, first:])
        return out

    @torch.no_grad()
    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from what the layer computes of random input."""
        trial = Trial.of(layer, self.operator, *_TRIED)
        wanted = trial.call
        if wanted is None or wanted.sink is not None:
            return float("inf")
        self.call_settings = (wanted.scale, wanted.softcap, wanted.sliding_window, None)
        call = self._call(self._normed(trial.hidden), trial.embeddings)
        mine = call.q, call.k, call.v, self._output(trial.hidden, trial.attended)
        return largest_difference(mine, (wanted.q, wanted.k, wanted.v, trial.output))

    def _normed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What attention is given, [batch, tokens, width]."""
        normed = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        weight, epsilon = norm_of(self._norms[0])
        prompt_layer.norm_rows(_rows(hidden_states), None, weight, epsilon, _rows(normed), _threads())
        return normed

    def _call(self, normed: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]) -> bridge.AttentionCall:
        """What the layer's attention function is asked for."""
        attention = self._attention
        cos, sin = (_rows(each) for each in embeddings)
        q, k, v = (_made(project, normed) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
        for rotated, norm in zip((q, k), self._head_norms, strict=True):
            weight, epsilon = norm_of(norm)
            normed_by = weight if weight.size else None
            prompt_layer.rotate_heads(_rows(rotated), cos, sin, normed_by, epsilon, _threads())
        q, k, v = (each.unflatten(2, (-1, self._dim)).transpose(1, 2) for each in (q, k, v))
        return bridge.AttentionCall(q, k, v, *self.call_settings)

    def _output(
        self, hidden_states: torch.Tensor, attended: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's output of its input [batch, tokens, width] and its attention's [batch, heads, tokens, dim]."""
        between = _made(self._attention.o_proj, attended.transpose(1, 2).flatten(2))
        normed = torch.empty_like(between)
        weight, epsilon = norm_of(self._norms[1])
        # What attention gives is added to what it was given, and stays for the end.
        before = _rows(hidden_states)
        prompt_layer.norm_rows(_rows(between), before, weight, epsilon, _rows(normed), _threads())
        gate, up = _made(self._gate, normed), _made(self._up, normed)
        prompt_layer.gate_rows(_rows(gate), _rows(up), self._activation, _threads())
        return torch.add(between, self._down(gate).detach(), out=between if out is None else out)


def _made(projection: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a projection makes of x, for kernels to write over."""
    made = projection(x).detach().to(x.dtype).contiguous()
    # Modules of others may keep what they give.
    return made if foreign_part(projection) is None else made.clone()


def _rows(tensor: torch.Tensor) -> np.ndarray:
    """[..., columns] as kernels take it, [rows, columns]: the same memory where the tensor is contiguous."""
    return bits(tensor.detach().contiguous().view(-1, tensor.shape[-1]))


def _threads() -> int:
    return at_most(torch.get_num_threads())
