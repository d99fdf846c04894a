"""Decoder layers of Llama's form, and the test of a fast path against such a layer.

The form: an RMSNorm before attention and one before a gated MLP; projections of queries, keys and values; optional
norms of their heads; rotation of both halves of a head. Having these parts does not prove that a layer computes nothing
else. The layer and its fast path therefore get the same random input, and their outputs are compared.
"""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter import bridge
from hetero_kv.adapter.cache_argument import as_cache
from hetero_kv.adapter.kept_trials import TRIALS_OF_MODEL
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.cpu_ops.gates import GELU_TANH, SILU
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, bits

_logger = logging.getLogger(__name__)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
GATES: dict[str, int] = {"SiLUActivation": SILU, "SiLU": SILU, "GELUTanh": GELU_TANH, "PytorchGELUTanh": GELU_TANH}
#: Attributes, mostly numbers, that a fast path reads from the modules of such a layer.
READ_NUMBERS = (
    "variance_epsilon", "eps", "scaling", "sliding_window", "head_dim", "_quantized", "residual_multiplier", "top_k",
    "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "route_scale", "n_group", "topk_group",
    "group_size", "n_groups", "norm_before_gate", "activation", "num_group", "ssm_in_multiplier", "ssm_out_multiplier",
    "attention_in_multiplier", "attn_out_multiplier", "key_multiplier", "gate_multiplier", "down_multiplier",
)  # fmt: skip
NONE = np.empty(0, np.float32)
# Names of the norm of a layer's input.
_FIRST_NORMS = "input_layernorm", "operator_norm", "norm"
_FIRST_POSITION = 7


def has_llama_form(layer: Any, operator: Any) -> bool:
    """Whether a decoder layer has exactly the parts of the form, and is on a CPU; `operator` replaces its attention."""
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
        # Attention that takes positions in addition to rotations (Ministral 3) computes something else.
        or "position_ids" in inspect.signature(type(attention).forward).parameters
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
    """Weight, float32, and epsilon of an RMSNorm; an empty weight for any other module."""
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if norm is None or not isinstance(epsilon, float) or [name for name, _ in norm.named_parameters()] != ["weight"]:
        return NONE, np.float32(0)
    return float32_array(norm.weight), np.float32(epsilon)


class CopiedFrom:
    """CPU tensors of which a fast path has copies, or arrays of the same memory, float32 or bfloat16.

    Args:
        tensors: those with copies.
        views: those whose memory the fast path reads, so only their address matters.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor] = ()) -> None:
        self._tensors = [*tensors, *views]
        self._places = [tensor.data_ptr() for tensor in self._tensors]
        self._arrays = [bits(tensor.detach()) for tensor in tensors]
        self._contents = [array.tobytes() for array in self._arrays]

    @property
    def is_unchanged(self) -> bool:
        """Whether addresses and numbers are unchanged; `tensor.data` allows changes that leave no other trace."""
        return (
            list(map(torch.Tensor.data_ptr, self._tensors)) == self._places
            and list(map(np.ndarray.tobytes, self._arrays)) == self._contents
        )


def float32_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's numbers as a float32 array."""
    return tensor.detach().to(torch.float32).contiguous().numpy()


@dataclass
class Trial:
    """The input and output of a layer in a trial; it replaces the operator and the cache.

    Attributes:
        hidden: [rows, tokens, width].
        embeddings: cos and sin, [rows, tokens, dim] each; None for a layer that does not rotate.
        call: the layer's call of its attention function.
        attended: the random result of that call, [rows, heads, tokens, dim].
        output: of the layer; empty when it is no tensor, or the layer calls attention more than once.
        behind: what follows the output in a tuple, all None; None for a layer that returns a tensor.
    """

    hidden: torch.Tensor
    embeddings: tuple[torch.Tensor, torch.Tensor] | None
    generator: torch.Generator
    call: bridge.AttentionCall | None = None
    attended: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    behind: tuple[None, ...] | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls, layer: Any, operator: AttentionOperator, rows: int, tokens: int, rotated: int | None = None, seed: int = 0,
        replaced: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> Trial:  # fmt: skip
        """Run the layer on random input, in its dtype.

        Args:
            rotated: numbers of a head that are rotated; None for all.
            replaced: other modules of the layer, by their names, in place of its own.
        """
        attention: Any = operator.wrapped
        weight = next(norm for name, norm in layer.named_children() if name in _FIRST_NORMS).weight
        generator = torch.Generator().manual_seed(operator.layer_idx + (seed << 16))
        hidden = torch.randn(rows, tokens, len(weight), generator=generator).to(weight.dtype)
        positions = _FIRST_POSITION + torch.arange(rows * tokens).view(rows, tokens, 1)
        angles = positions * torch.logspace(0, -3, (attention.head_dim if rotated is None else rotated) // 2)
        angles = torch.cat([angles, angles], -1)
        embeddings = None if rotated == 0 else (angles.cos().to(weight.dtype), angles.sin().to(weight.dtype))
        trial = cls(hidden, embeddings, generator)
        # A copy with the same modules: other threads may use this layer meanwhile.
        copied = copy.copy(layer)
        name = next(name for name, module in layer.named_children() if module is operator)
        copied._modules = layer._modules | {name: attention} | dict(replaced)
        with bridge.handled_by(trial) as service:
            output = copied.forward(
                hidden, attention_mask=None, use_cache=True, **as_embeddings(copied.forward, embeddings),
                **as_cache(copied.forward, trial),
            )  # fmt: skip
        output, trial.behind = parted(output)
        # Any other output cannot be compared.
        if service.calls == 1 and isinstance(output, torch.Tensor):
            trial.output = output
        return trial

    def attend(self, cache: Any, call: bridge.AttentionCall) -> torch.Tensor:
        """See `bridge.AttentionHandler`: random numbers."""
        shape = *call.q.shape[:3], call.v.shape[3]
        self.call, self.attended = call, torch.randn(shape, generator=self.generator).to(call.q.dtype)
        return self.attended

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See transformers' caches: the past is empty, so that only the new tokens return."""
        return keys, values


def as_embeddings(forward: Callable[..., Any], embeddings: Any) -> dict[str, Any]:
    """The keyword argument that passes position embeddings to a layer; empty for None and a layer that takes none."""
    is_passed = embeddings is not None or "position_embeddings" in inspect.signature(forward).parameters
    return {"position_embeddings": embeddings} if is_passed else {}


def parted(output: Any) -> tuple[Any, tuple[None, ...] | None]:
    """A layer's hidden states, and what follows them if it returns a tuple of them and None; (output, None) else."""
    if isinstance(output, tuple) and all(each is None for each in output[1:]):
        return output[0], output[1:]
    return output, None


@dataclass(frozen=True)
class FastPathOwner:
    """The owner of a fast path, for the log: its mixer's path, and an object that all layers of its model share."""

    path: str
    model: Any


class FastPath(Protocol):
    """A fast path that computes the same as a decoder layer."""

    @property
    @abstractmethod
    def operator(self) -> AttentionOperator | FastPathOwner:
        """The operator of the layer's attention, or the owner of another mixer."""

    @abstractmethod
    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from the layer's output for random input."""


@runtime_checkable
class KeptFastPath(FastPath, Protocol):
    """A fast path whose trials are kept (`kept_trials`)."""

    @abstractmethod
    def found(self) -> Any:
        """What the trial has found, besides that the outputs agree, as JSON; None if it cannot be kept."""

    @abstractmethod
    def take(self, found: Any) -> None:
        """Be as after the trial that has found this."""


def agrees(fast_path: FastPath, layer: Any, tolerance: float, name: str, level: int = logging.WARNING) -> bool:
    """Whether a fast path agrees with its layer up to `tolerance`; a difference is logged at `level`.

    Args:
        name: of the fast path, in the log.
    """
    trials = TRIALS_OF_MODEL.get()
    if trials is None or not isinstance(fast_path, KeptFastPath):
        return _agrees(fast_path, layer, tolerance, name, level)
    kept = trials.result(name, fast_path.operator.path)
    if kept is not None:
        fast_path.take(kept)
        return True
    agreed = _agrees(fast_path, layer, tolerance, name, level)
    trials.show(name, fast_path.operator.path, fast_path.found() if agreed else None)
    return agreed


def _agrees(fast_path: FastPath, layer: Any, tolerance: float, name: str, level: int) -> bool:
    try:
        difference = fast_path.difference_from(layer)
    except Exception as error:
        # The layer needs something that the trial lacks: it runs without the fast path.
        _say_once(
            logging.WARNING, fast_path.operator, f"{name} cannot be tested on random input ({type(error).__name__})"
        )
        _logger.debug("%s", fast_path.operator.path, exc_info=error)
        return False
    if difference <= tolerance:
        return True
    _say_once(level, fast_path.operator, f"{name} differs from the layer", f" by a relative {difference:.2g}")
    return False


# id of a model's config, or of another object of the model -> that, and the messages logged for this model.
_logged: dict[int, tuple[weakref.ref[Any], set[str]]] = {}


def _say_once(level: int, operator: AttentionOperator | FastPathOwner, what: str, more: str = "") -> None:
    """Log why a layer runs without a fast path, once per model: the reason is mostly the same in all layers."""
    config = operator.model if isinstance(operator, FastPathOwner) else operator._own_config
    of, logged = _logged.get(id(config), (None, set()))
    if of is None or of() is not config:
        logged = set()
        _logged[id(config)] = weakref.ref(config), logged
    if what not in logged:
        logged.add(what)
        _logger.log(
            level, "%s: %s%s; it is not used, and this warning is not repeated for other layers of this model",
            operator.path, what, more,
        )  # fmt: skip


def largest_difference(mine: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """The largest relative difference, of norms; infinite where shapes differ or a number is not finite."""
    return max(_difference(*pair) for pair in zip(mine, reference, strict=True))


def update_difference(mine: torch.Tensor, reference: torch.Tensor, hidden: torch.Tensor) -> float:
    """The relative difference, of norms, of what a layer adds to its input `hidden`, beyond the outputs' rounding.

    A layer with small weights adds little, so the difference of outputs alone would hide errors.
    """
    if mine.shape != reference.shape or not (torch.isfinite(mine).all() and torch.isfinite(reference).all()):
        return float("inf")
    rounding = torch.finfo(reference.dtype).eps * float(reference.float().norm())
    mine, reference, hidden = mine.float(), reference.float(), hidden.float()
    difference = max(0.0, float((mine - reference).norm()) - rounding)
    return difference / max(float((reference - hidden).norm()), 1e-30)


def _difference(mine: torch.Tensor, reference: torch.Tensor) -> float:
    if mine.shape != reference.shape or not (torch.isfinite(mine).all() and torch.isfinite(reference).all()):
        return float("inf")
    mine, reference = mine.float(), reference.float()
    return float((mine - reference).norm() / reference.norm().clamp_min(1e-30))
