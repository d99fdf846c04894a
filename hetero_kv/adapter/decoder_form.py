"""The declared forms of decoder layers that the fused decode step computes.

A form names the role of each module of a layer. A layer with these parts may still compute something else, so the fused
step is tested against the layer before it is used (`llama_layer.agrees`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hetero_kv.adapter.llama_layer import NONE, float32_array, norm_of
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.quantized_matrix import QuantizedLinear
from hetero_kv.cpu_ops.weight_formats import GROUP
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES
from hetero_kv.weights.quantized_weight import QuantizedWeight

_UNUSED = "rotary_emb"
# The setting of Granite 4's positions, and its value for rotations.
_POSITIONS, _ROTATED = "position_embedding_type", "rope"
# Parts of names of attributes that limit a module's values.
_LIMITS = "limit", "clamp", "clip"


@dataclass(frozen=True)
class _LayerNames:
    """The names of a layer's parts: norms before and after attention and MLP, these, an MLP beside a mixture, and a
    recurrent mixer beside attention.

    Empty for none.
    """

    norm: str
    attention: str
    after_norm: str = ""
    mlp_norm: str = ""
    mlp: str = ""
    after_mlp_norm: str = ""
    shared: str = ""
    beside: str = ""


_LAYERS = (
    _LayerNames("input_layernorm", "self_attn", "", "post_attention_layernorm", "mlp"),
    # Granite's mixtures.
    _LayerNames("input_layernorm", "self_attn", "", "post_attention_layernorm", "block_sparse_moe"),
    # LFM2.
    _LayerNames("operator_norm", "self_attn", "", "ffn_norm", "feed_forward"),
    # Bamba and Jamba.
    _LayerNames("input_layernorm", "self_attn", "", "pre_ff_layernorm", "feed_forward"),
    # Granite 4.
    _LayerNames("input_layernorm", "self_attn", "", "post_attention_layernorm", "shared_mlp"),
    _LayerNames(
        "input_layernorm", "self_attn", "", "post_attention_layernorm", "block_sparse_moe", shared="shared_mlp"
    ),
    # Gemma 2 and 3.
    _LayerNames(
        "input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
        "post_feedforward_layernorm",
    ),
    # Falcon-H1.
    _LayerNames("input_layernorm", "self_attn", "", "pre_ff_layernorm", "feed_forward", beside="mamba"),
    # Nemotron-H.
    _LayerNames("norm", "mixer"),
)  # fmt: skip
# Nemotron-H's layers that are an MLP or experts: the norm and these.
_BLOCK = "norm", "mixer"
_OUTPUTS = "o_proj", "out_proj"
_HEAD_NORMS = ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm")


@dataclass(frozen=True)
class DecoderForm:
    """The parts of a decoder layer; None for those that it lacks. It has attention, an MLP, or both.

    Attributes:
        attention: the module that the operator wraps, or a recurrent mixer.
        norm, mlp_norm: before attention and MLP.
        after_norm, after_mlp_norm: norms of the outputs of attention and MLP.
        projections: of queries, keys, values and the output, packed; of a recurrent mixer the output alone.
        head_norms: of queries and keys.
        mlp: an MLP, or a mixture of experts.
        shared: an MLP beside the mixture, of the layer itself, that all tokens take.
        beside: a recurrent mixer with the same input as attention, whose outputs are added.
        has_gates: whether the queries' projection has a gate after each head's query.
        rotates: whether queries and keys are rotated.
        input_factor, key_factor, factor: of attention's input, of its keys before any norm, and of its output.
        beside_factor, mlp_factor: of the outputs of `beside` and of the MLP.
    """

    attention: Any = None
    norm: Any = None
    after_norm: Any = None
    mlp_norm: Any = None
    after_mlp_norm: Any = None
    projections: tuple[Any, ...] = ()
    head_norms: tuple[Any, Any] = (None, None)
    mlp: Any = None
    shared: Any = None
    beside: Any = None
    has_gates: bool = False
    rotates: bool = True
    input_factor: float = 1.0
    key_factor: float = 1.0
    factor: float = 1.0
    beside_factor: float = 1.0
    mlp_factor: float = 1.0

    @property
    def norms(self) -> list[Any]:
        """All norms of the layer."""
        found = self.norm, self.after_norm, self.mlp_norm, self.after_mlp_norm, *self.head_norms
        return [norm for norm in found if norm is not None]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layer's norms, and of its hidden states."""
        dtype: torch.dtype = self.norms[0].weight.dtype
        return dtype

    @classmethod
    def of_block(cls, layer: Any) -> DecoderForm | None:
        """The form of a layer on a CPU that is an MLP or a mixture alone; None for an unknown one."""
        parts = dict(layer.named_children())
        if any(parameter.device.type != "cpu" for parameter in layer.parameters()) or parts.keys() != set(_BLOCK):
            return None
        norm, mlp = (parts[name] for name in _BLOCK)
        return cls(mlp_norm=norm, mlp=mlp) if applied_factors(norm).size else None

    @classmethod
    def of(cls, layer: Any, operator: Any) -> DecoderForm | None:
        """The form of a decoder layer on a CPU; None for an unknown one. `operator` replaces its attention."""
        if any(parameter.device.type != "cpu" for parameter in layer.parameters()):
            return None
        if not isinstance(operator, AttentionOperator) or type(operator).forward is not AttentionOperator.forward:
            return None
        parts = dict(layer.named_children())
        names = next((each for each in _LAYERS if parts.keys() == set(vars(each).values()) - {""}), None)
        attention: Any = operator.wrapped
        if names is None or parts[names.attention] is not operator:
            return None
        inner = dict(attention.named_children())
        output = next((inner[name] for name in _OUTPUTS if name in inner), None)
        projections: tuple[Any, ...] = (*(inner.get(name) for name in ("q_proj", "k_proj", "v_proj")), output)
        head_norms = next(((inner[q], inner[k]) for q, k in _HEAD_NORMS if q in inner and k in inner), (None, None))
        known = [*projections, *head_norms, inner.get(_UNUSED)]
        if any(not any(part is each for each in known) for part in inner.values()) or not are_packed(projections):
            return None
        # Attention that takes positions in addition to rotations (Ministral 3) computes something else; and a trial may
        # not reach a limit of projections (OLMo's).
        arguments = inspect.signature(type(attention).forward).parameters
        if "position_ids" in arguments or getattr(attention.config, "clip_qkv", None) is not None:
            return None
        # Jamba's and Nemotron-H's attention gets no positions, Granite 4's only if its config says so.
        rotates = "position_embeddings" in arguments and getattr(attention.config, _POSITIONS, _ROTATED) == _ROTATED
        dim = getattr(attention, "head_dim", None)
        q, k, v, o = projections
        if not isinstance(dim, int) or any(each.out_features % dim for each in (q, k, v)) or o.in_features % dim:
            return None
        if k.out_features != v.out_features or q.out_features not in (o.in_features, 2 * o.in_features):
            return None
        if len({each.bias is not None for each in (q, k, v)}) != 1:
            return None
        residual = factor_of(layer, "residual_multiplier")
        form = cls(
            attention=attention,
            norm=parts[names.norm],
            after_norm=parts.get(names.after_norm),
            mlp_norm=parts.get(names.mlp_norm),
            after_mlp_norm=parts.get(names.after_mlp_norm),
            projections=projections,
            head_norms=head_norms,
            mlp=parts.get(names.mlp),
            shared=parts.get(names.shared),
            beside=parts.get(names.beside),
            has_gates=q.out_features != o.in_features,
            rotates=rotates,
            input_factor=factor_of(layer, "attention_in_multiplier"),
            key_factor=factor_of(attention, "key_multiplier"),
            factor=residual * factor_of(layer, "attn_out_multiplier"),
            beside_factor=residual * factor_of(layer, "ssm_out_multiplier"),
            mlp_factor=residual,
        )
        norms = [applied_norm(norm) for norm in form.norms]
        of_layer = norms[: len(norms) - 2 * (head_norms[0] is not None)]
        if not all(weight.size for weight, _ in norms) or len({epsilon for _, epsilon in of_layer}) != 1:
            return None
        of_heads = norms[len(of_layer) :]
        # The kernel has one epsilon for both, and a trial would hardly reveal a different one.
        if len({epsilon for _, epsilon in of_heads}) > 1:
            return None
        sizes = [weight.size for weight, _ in of_heads]
        widths = o.in_features, k.out_features
        if any(size % dim or width % size for size, width in zip(sizes, widths, strict=False)):
            return None
        return form if not form.has_gates or sizes == [dim, dim] or not sizes else None


def are_packed(matrices: Sequence[Any], *, in_any_order: bool = False) -> bool:
    """Whether all are linear layers over quantized codes in DRAM, with inputs of whole groups.

    Args:
        in_any_order: whether the packed columns may be in another order than the inputs.
    """
    return all(
        isinstance(matrix, QuantizedLinear)
        and isinstance(matrix.quantized, QuantizedWeight)
        and matrix.quantized.has_codes
        and (in_any_order or matrix.inputs is None)
        and matrix.in_features % GROUP == 0
        for matrix in matrices
    )


def has_own_numbers(module: Any, known: Sequence[str] = ()) -> bool:
    """Whether a module has a number as an attribute, such as a limit that a trial might not reach.

    Whole numbers are mostly sizes; they count only if their names suggest a limit. known: names that do not count.
    """
    return any(
        isinstance(value, float) or (isinstance(value, int) and any(word in name for word in _LIMITS))
        for name, value in vars(module).items()
        if name not in known
    )


def factor_of(module: Any, name: str) -> float:
    """A module's attribute `name`, a factor; 1 for none."""
    return float(getattr(module, name, 1.0))


def applied_norm(norm: Any) -> tuple[np.ndarray, np.float32]:
    """Factors, float32, and epsilon of an RMSNorm; empty factors for None, or a module that computes something else.

    Some modules multiply with one plus their weight (Gemma's): the factors are found by the norm of ones.
    """
    weight, epsilon = norm_of(norm)
    if not weight.size or norm.weight.dtype not in ARRAY_DTYPES:
        return NONE, np.float32(0)
    with torch.no_grad():
        found = norm(torch.ones(1, weight.size)).float()[0] * float(np.sqrt(1 + epsilon))
    factors = next((each for each in (weight, 1 + weight) if np.allclose(found.numpy(), each, 1e-2, 1e-2)), NONE)
    return factors, epsilon


def applied_factors(norm: Any) -> np.ndarray:
    """The factors of a norm; empty for None."""
    return applied_norm(norm)[0]


def floats_of(tensor: torch.Tensor | None) -> np.ndarray:
    """A tensor's numbers as a flat float32 array; empty for None."""
    return NONE if tensor is None else float32_array(tensor).reshape(-1)
