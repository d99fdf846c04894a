"""Decoder layers of Llama's form, and the trial of what computes the same as one of them.

Such a layer has an RMSNorm before its attention and one before its gated MLP, projections of queries, keys and values,
norms of their heads or none, and rotates both halves of a head. That a layer with these parts computes nothing else is
not believed but tried: it and what is to stand for it are given the same random input.
"""

from __future__ import annotations

import copy
import logging
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from cpu_ops.gates import GELU_TANH, SILU
from hetero_kv.adapter import bridge
from hetero_kv.adapter.cache_argument import as_cache
from hetero_kv.adapter.kernel_arrays import ARRAY_DTYPES, bits
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.errors import said_briefly

_logger = logging.getLogger(__name__)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
GATES: dict[str, int] = {"SiLUActivation": SILU, "SiLU": SILU, "GELUTanh": GELU_TANH, "PytorchGELUTanh": GELU_TANH}
#: Numbers that a fast path has read from modules of such a layer.
READ_NUMBERS = ("variance_epsilon", "eps", "scaling", "sliding_window", "head_dim", "_quantised")
NONE = np.empty(0, np.float32)
_FIRST_POSITION = 7


def has_llama_form(layer: Any, operator: Any) -> bool:
    """Whether a decoder layer, whose attention `operator` is, is made of these parts, and lies on a CPU."""
    if any(parameter.device.type != "cpu" for parameter in layer.parameters()):
        return False
    if not isinstance(operator, AttentionOperator) or type(operator).forward is not AttentionOperator.forward:
        return False
    attention = operator.wrapped
    if {name for name, _ in layer.named_children()} != {
        "input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
    }:  # fmt: skip
        return False
    parts = {name for name, _ in attention.named_children()}
    if (
        not set(PROJECTIONS) <= parts <= {*PROJECTIONS, *HEAD_NORMS, "rotary_emb"}
        or len(parts & {*HEAD_NORMS}) == 1
        or {name for name, _ in layer.mlp.named_children()} != {*MLP, "act_fn"}
    ):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in HEAD_NORMS if name in parts]
    return (
        all(norm_of(norm)[0].size and norm.weight.dtype in ARRAY_DTYPES for norm in norms)
        and type(layer.mlp.act_fn).__name__ in GATES
        and isinstance(getattr(attention, "head_dim", None), int)
    )


def norm_of(norm: Any) -> tuple[np.ndarray, np.float32]:
    """Weight, float32, and epsilon of an RMSNorm; an empty weight for what is none."""
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if norm is None or not isinstance(epsilon, float) or [name for name, _ in norm.named_parameters()] != ["weight"]:
        return NONE, np.float32(0)
    return float32_array(norm.weight), np.float32(epsilon)


class CopiedFrom:
    """Tensors on a CPU of which a fast path has a copy, or an array of the same memory, float32 or bfloat16."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._places = [tensor.data_ptr() for tensor in self._tensors]
        self._arrays = [bits(tensor.detach().contiguous()) for tensor in self._tensors]
        self._contents = [array.tobytes() for array in self._arrays]

    @property
    def is_unchanged(self) -> bool:
        """Whether they lie where they did, with the numbers that they had: `tensor.data` leaves no trace but these."""
        return (
            list(map(torch.Tensor.data_ptr, self._tensors)) == self._places
            and list(map(np.ndarray.tobytes, self._arrays)) == self._contents
        )


def float32_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's numbers as float32."""
    return tensor.detach().to(torch.float32).contiguous().numpy()


@dataclass
class Trial:
    """What a layer was given, and what it made of it. Stands for the operator and for the cache meanwhile.

    Attributes:
        hidden: [rows, tokens, width].
        embeddings: cos and sin, [rows, tokens, dim] each.
        call: what its attention function was asked for.
        attended: what that gave, [rows, heads, tokens, dim].
        output: what the layer gave; empty where that is no tensor, or it asked for attention more than once.
    """

    hidden: torch.Tensor
    embeddings: tuple[torch.Tensor, torch.Tensor]
    generator: torch.Generator
    call: bridge.AttentionCall | None = None
    attended: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    @torch.no_grad()
    def of(cls, layer: Any, operator: AttentionOperator, rows: int, tokens: int) -> Trial:
        """The layer's own work on random input, in its dtype."""
        attention: Any = operator.wrapped
        weight = layer.input_layernorm.weight
        generator = torch.Generator().manual_seed(operator.layer_idx)
        hidden = torch.randn(rows, tokens, len(weight), generator=generator).to(weight.dtype)
        positions = _FIRST_POSITION + torch.arange(rows * tokens).view(rows, tokens, 1)
        angles = positions * torch.logspace(0, -3, attention.head_dim // 2)
        angles = torch.cat([angles, angles], -1)
        trial = cls(hidden, (angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)), generator)
        # A layer like it, of the same modules: others may use this one meanwhile.
        twin = copy.copy(layer)
        twin._modules = layer._modules | {"self_attn": attention}
        with bridge.served_by(trial) as service:
            output = twin.forward(
                hidden, position_embeddings=trial.embeddings, attention_mask=None, use_cache=True,
                **as_cache(twin.forward, trial),
            )  # fmt: skip
        # Of anything else nothing comes that could be compared.
        if service.calls == 1 and isinstance(output, torch.Tensor):
            trial.output = output
        return trial

    def attend(self, cache: Any, call: bridge.AttentionCall) -> torch.Tensor:
        """See `bridge.Serving`: random numbers."""
        shape = *call.q.shape[:3], call.v.shape[3]
        self.call, self.attended = call, torch.randn(shape, generator=self.generator).to(call.q.dtype)
        return self.attended

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See transformers' caches: there is nothing but the new tokens."""
        return keys, values


class Way(Protocol):
    """What computes the same as a decoder layer."""

    @property
    @abstractmethod
    def operator(self) -> AttentionOperator:
        """That of the layer's attention."""

    @abstractmethod
    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from what the layer computes of random input."""


def agrees(way: Way, layer: Any, tolerance: float, name: str, level: int = logging.WARNING) -> bool:
    """Whether a way gives what its layer gives, up to `tolerance`; where not, that is logged, a difference at `level`.

    name: of the way, in what is logged.
    """
    try:
        difference = way.difference_from(layer)
    except Exception as error:
        # Whatever the layer wants that the trial does not give: it goes on by itself.
        _say_once(logging.WARNING, way.operator, f"{name} cannot be tried: {said_briefly(error)}")
        return False
    if difference <= tolerance:
        return True
    _say_once(level, way.operator, f"{name} differs from the layer", f" by {difference:.2g} of its size")
    return False


# id of a model's config -> the config, and what was said of layers of this model.
_said: dict[int, tuple[weakref.ref[Any], set[str]]] = {}


def _say_once(level: int, operator: AttentionOperator, what: str, more: str = "") -> None:
    """Log why a layer goes on by itself, once for a model: it is mostly the same in all of its layers."""
    config = operator._own_config
    of, said = _said.get(id(config), (None, set()))
    if of is None or of() is not config:
        said = set()
        _said[id(config)] = weakref.ref(config), said
    if what not in said:
        said.add(what)
        _logger.log(
            level, "%s: %s%s, so that it is not used; of other layers of this model the same is not said again",
            operator.path, what, more,
        )  # fmt: skip


def largest_difference(mine: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest relative difference, of norms, of tensors; infinite where shapes differ or a number is not finite."""
    return max(_difference(*pair) for pair in zip(mine, wanted, strict=True))


def _difference(mine: torch.Tensor, wanted: torch.Tensor) -> float:
    if mine.shape != wanted.shape or not (torch.isfinite(mine).all() and torch.isfinite(wanted).all()):
        return float("inf")
    mine, wanted = mine.float(), wanted.float()
    return float((mine - wanted).norm() / wanted.norm().clamp_min(1e-30))
