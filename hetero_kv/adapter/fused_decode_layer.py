"""The fused decode step of a decoder layer of Llama's form: two native calls per token.

Such a layer (RMSNorm, quantized projections, rotation of both halves, gated MLP) takes some fifty small torch calls per
token around its attention. If all its weights are quantized, `cpu_ops.fused_decode_layer` computes the same in two
calls. Equivalence is tested: before the first token the path and the wrapped layer get the same random input, and the
path is used only if their outputs agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hetero_kv.adapter import bridge
from hetero_kv.adapter.decode_buffers import decode_buffers, hidden_array, new_hidden
from hetero_kv.adapter.foreign import PlainTree
from hetero_kv.adapter.kernel_arrays import ARRAY_DTYPES, bits
from hetero_kv.adapter.llama_layer import (
    GATES,
    MLP,
    NONE,
    PROJECTIONS,
    READ_NUMBERS,
    CopiedFrom,
    Trial,
    agrees,
    float32_array,
    has_llama_form,
    largest_difference,
    norm_of,
)
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.quantized_matrix import QuantizedLinear
from hetero_kv.cpu_ops.fused_decode_layer import attention_inputs, attention_output, gate_region
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.quantized_linear import multiply_region
from hetero_kv.cpu_ops.threads import at_most, one_kernel_at_a_time
from hetero_kv.cpu_ops.weight_dots import rows_per_pass
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE
from hetero_kv.weights.quantized_weight import QuantizedWeight, most_rows_of_codes

#: Largest relative difference (of norms) from the wrapped layer, by the model's dtype: it covers rounding to that
#: dtype, and int8 activations that round differently in consequence.
_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 3e-2}
_TRIED_ROWS = 2
# NumPy builds the name of a type anew each time.
_NAMES = {np.dtype(name): name for name in ("float32", "uint16")}


class FusedDecodeLayer:
    """The fused decode step of one decoder layer.

    Args:
        layer: the decoder layer, its attention replaced by `operator`.

    Use `of`, which checks the layer's form.
    """

    def __init__(self, layer: Any, operator: AttentionOperator) -> None:
        attention: Any = operator.wrapped
        mlp = layer.mlp
        self.operator = operator
        self.dim: int = attention.head_dim
        projections = [getattr(attention, name) for name in PROJECTIONS]
        q_heads, k_heads, v_heads = (projection.out_features // self.dim for projection in projections[:3])
        self.heads = q_heads, k_heads, v_heads
        self._matrices = [matrix.quantized for matrix in (*projections, *(getattr(mlp, name) for name in MLP))]
        dtype = layer.input_layernorm.weight.dtype
        self._most_rows = min(most_rows_of_codes(matrix.name, dtype) for matrix in self._matrices)
        table = np.array([matrix.kernels for matrix in self._matrices], dtype=np.int64)
        self._inputs, self._outputs = table[:3].copy(), table[3:].copy()
        biases = [projection.bias for projection in projections[:3]]
        self._bias = float32_array(torch.cat(biases)) if biases[0] is not None else NONE
        self._input_norm = layer.input_layernorm
        self._norm, self._epsilon = norm_of(layer.input_layernorm)
        self._mlp_norm, self._mlp_epsilon = norm_of(layer.post_attention_layernorm)
        self._query_norm, self._head_epsilon = norm_of(getattr(attention, "q_norm", None))
        self._key_norm, _ = norm_of(getattr(attention, "k_norm", None))
        self._per_pass = rows_per_pass()
        self._multiply = all_threads(), multiply_region()
        self._gate_up = gate_region(GATES[type(mlp.act_fn).__name__])
        self.call_settings: tuple[float, float | None, int | None, Any] = (0.0, None, None, None)
        self._tree = PlainTree(layer, READ_NUMBERS)
        norms = [
            self._input_norm, layer.post_attention_layernorm, getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
        ]  # fmt: skip
        copied = [*(norm.weight for norm in norms if norm is not None), *(bias for bias in biases if bias is not None)]
        self._copied = CopiedFrom(copied)

    @property
    def is_current(self) -> bool:
        """Whether the layer's modules, hooks, and all copied numbers are unchanged since the path was made."""
        return self._tree.is_unchanged and self._copied.is_unchanged

    @classmethod
    def of(cls, layer: Any, operator: Any) -> FusedDecodeLayer | None:
        """The fused decode step of a plain decoder layer; None for another form, or if the outputs differ."""
        if not _has_form(layer, operator):
            return None
        path, dtype = cls(layer, operator), layer.input_layernorm.weight.dtype
        return path if agrees(path, layer, _TOLERANCE[dtype], "the fused decode layer") else None

    def fits(self, hidden_states: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
        """Whether these tokens, one per row, can take the path."""
        embeddings = kwargs.get("position_embeddings")
        return (
            hidden_states.dim() == 3
            and hidden_states.device.type == "cpu"
            and hidden_states.shape[1] == 1
            and len(hidden_states) <= self._most_rows
            and isinstance(embeddings, tuple)
            and embeddings[0].shape[-1] == self.dim
            and kwargs.get("attention_mask") is None
            and not bridge.changes_attention(kwargs)
            # The path has no dropout.
            and not self.operator.training
        )

    def __call__(self, hidden_states: torch.Tensor, cache: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The layer's output for [rows, 1, width]."""
        if self.operator.changes_arguments:
            arguments = (self._input_norm(hidden_states),) if self.operator.reads_hidden_states else ()
            kwargs = self.operator.arguments_for(arguments, dict(kwargs))
        hidden, dtype = hidden_array(hidden_states), hidden_states.dtype
        scale, softcap, window, _ = self.call_settings
        prepared = None if window is not None else self.operator.prepare_arrays(cache, ARRAY_DTYPES[dtype], softcap)
        if prepared is None:
            q, k, v = self.queries_keys_values(hidden, dtype, kwargs["position_embeddings"])
            attended = self.operator.attend(cache, bridge.AttentionCall(q, k, v, *self.call_settings))
            return self.output(hidden_states, hidden, _array(attended))
        arrays = decode_buffers(len(hidden), self.heads, self.dim, dtype)
        self._make_inputs(hidden, kwargs["position_embeddings"], arrays.q, arrays.k, arrays.v)
        self.operator.attend_arrays(prepared, arrays, scale, softcap or 0.0)
        return self.output(hidden_states, hidden, arrays.attended_rows)

    def queries_keys_values(
        self, hidden: np.ndarray, dtype: torch.dtype, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of the attention function, [rows, heads, 1, dim] each, from hidden states [rows, width]."""
        q, k, v = (torch.empty((len(hidden), heads, 1, self.dim), dtype=dtype) for heads in self.heads)
        self._make_inputs(hidden, position_embeddings, bits(q), bits(k), bits(v))
        return q, k, v

    def _make_inputs(
        self, hidden: np.ndarray, position_embeddings: tuple[torch.Tensor, torch.Tensor],
        q: np.ndarray, k: np.ndarray, v: np.ndarray,
    ) -> None:  # fmt: skip
        cos, sin = _ROTATION.arrays(position_embeddings, len(hidden))
        kernel = attention_inputs(_NAMES[hidden.dtype], _NAMES[cos.dtype])
        with one_kernel_at_a_time:
            kernel(
                *self._multiply, hidden, self._norm, self._epsilon, self._inputs, self._bias, self._query_norm,
                self._key_norm, self._head_epsilon, cos, sin, q, k, v, self._per_pass, at_most(torch.get_num_threads()),
            )  # fmt: skip

    def output(self, hidden_states: torch.Tensor, hidden: np.ndarray, attended: np.ndarray) -> torch.Tensor:
        """The layer's output from its input [rows, 1, width], also as an array, and its attention's [rows, all]."""
        out, array = new_hidden(hidden_states)
        kernel = attention_output(_NAMES[hidden.dtype])
        with one_kernel_at_a_time:
            kernel(
                *self._multiply, self._gate_up, hidden, attended, self._mlp_norm, self._mlp_epsilon, self._outputs,
                array, self._per_pass, at_most(torch.get_num_threads()),
            )  # fmt: skip
        return out

    @torch.no_grad()
    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from the layer's output for random input."""
        trial = Trial.of(layer, self.operator, _TRIED_ROWS, 1)
        call, hidden = trial.call, trial.hidden
        if call is None or call.sink is not None:
            return float("inf")
        self.call_settings = (call.scale, call.softcap, call.sliding_window, None)
        array = _array(hidden)
        mine = (
            *self.queries_keys_values(array, hidden.dtype, trial.embeddings),
            self.output(hidden, array, _array(trial.attended)),
        )
        return largest_difference(mine, (call.q, call.k, call.v, trial.output))


class _Rotation:
    """The latest position embeddings as arrays: all layers of a token get the same embeddings."""

    def __init__(self) -> None:
        self.last: tuple[Any, ...] = (None, None, 0, None)

    def arrays(self, embeddings: tuple[torch.Tensor, torch.Tensor], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin as [rows, dim]."""
        cos, sin, last_rows, made = self.last
        if cos is not embeddings[0] or sin is not embeddings[1] or last_rows != rows:
            made = (_array(embeddings[0].expand(rows, 1, -1)), _array(embeddings[1].expand(rows, 1, -1)))
            self.last = (*embeddings, rows, made)
        return made


_ROTATION = _Rotation()


def _has_form(layer: Any, operator: Any) -> bool:
    """Whether a decoder layer has the parts that the fused decode step computes, with all weights quantized."""
    if not has_llama_form(layer, operator):
        return False
    attention = operator.wrapped
    matrices = [getattr(attention, name) for name in PROJECTIONS] + [getattr(layer.mlp, name) for name in MLP]
    if not all(
        isinstance(matrix, QuantizedLinear)
        and isinstance(matrix.quantized, QuantizedWeight)
        and matrix.quantized.has_codes
        for matrix in matrices
    ):
        return False
    biases = [matrix.bias is not None for matrix in matrices]
    return (
        len(set(biases[:3])) == 1
        and not any(biases[3:])
        and all(matrix.in_features % GROUP == 0 for matrix in matrices)
        and matrices[4].out_features == matrices[5].out_features == matrices[6].in_features
        and matrices[6].in_features % TILE == 0
        and all(matrix.out_features % attention.head_dim == 0 for matrix in matrices[:3])
        and matrices[1].out_features == matrices[2].out_features
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    """[rows, all else] as float32, or the bits of bfloat16; rows that share memory are copied."""
    return bits(tensor.detach().reshape(tensor.shape[0], -1).contiguous())
