"""The declared form of a mixture of experts: how its router chooses experts, and its shared expert.

The parts of a block are found by their shapes. The kind of routing is found by trial: the block routes random rows, and
the known kind that makes the same choices in most rows, with the same shares, is used. The whole layer is tested before
use (`llama_layer.agrees`).
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter.decoder_form import floats_of
from hetero_kv.adapter.expert_products import ExpertProducts
from hetero_kv.adapter.packed_mlp import PackedMLP
from hetero_kv.adapter.quantized_experts import QuantizedExperts
from hetero_kv.cpu_ops.routing import SIGMOID, SOFTMAX
from hetero_kv.cpu_ops.weight_formats import GROUP
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, bits

_logger = logging.getLogger(__name__)

_SHARED = "shared_expert", "shared_experts", "shared_mlp"
_SHARED_GATE = "shared_expert_gate"
# Names of settings: the number of groups of experts, and of groups that are kept.
_GROUPS, _KEPT = ("num_group", "n_group"), "topk_group"
_TRIED_ROWS = 256
# Rows that may be routed differently, because two experts are nearly tied; and a tolerance of shares, relative.
_TIES, _TOLERANCE = 1, 1e-4


@dataclass(frozen=True)
class MixtureForm:
    """A mixture's block as arguments of `cpu_ops.fused_mixture`.

    Attributes:
        experts, products: the operator of the experts, and its arguments of the kernels.
        router: [experts, width], the module's memory.
        router_bias, correction: [experts] float32, copies; empty for none.
        choice: the `form` of `cpu_ops.routing.choose_experts`; scale: of the shares; k: experts of a row.
        shared: [3, 5] int64, of the shared expert's matrices; empty for none.
        shared_gate: [width] float32, a copy; empty for none.
        copied: the tensors of the copies.
    """

    experts: QuantizedExperts
    products: ExpertProducts
    router: np.ndarray
    router_bias: np.ndarray
    correction: np.ndarray
    choice: np.ndarray
    scale: np.float32
    k: int
    shared: np.ndarray
    shared_gate: np.ndarray
    copied: tuple[torch.Tensor, ...]
    _weights: torch.Tensor
    _buffers: tuple[tuple[dict[str, Any], str, torch.Tensor], ...]

    @property
    def is_current(self) -> bool:
        """Whether the experts, the router's weights and all buffers are unchanged."""
        return (
            self._weights.data_ptr() == self.router.ctypes.data
            and self.experts.routed.products() is self.products
            and all(owner.get(name) is buffer for owner, name, buffer in self._buffers)
        )

    @classmethod
    def of(cls, block: Any, beside: Any = None) -> MixtureForm | None:
        """The form of a block; None for an unknown one, which is logged by name.

        Args:
            beside: a shared expert that is no part of the block; None for none.
        """
        experts = getattr(block, "experts", None)
        if not isinstance(experts, QuantizedExperts) or experts.form.takes_all_rows or not all(experts.parts.values()):
            return None
        products = experts.routed.products()
        if products is None:
            return None
        try:
            return cls._found(block, experts, products, beside)
        except Exception as error:
            # The block has inputs or outputs that the trial lacks.
            _logger.info("%s: the routing cannot be tried (%s)", experts.path, type(error).__name__)
            _logger.debug("%s", experts.path, exc_info=error)
            return None

    @classmethod
    @torch.no_grad()
    def _found(cls, block: Any, experts: QuantizedExperts, products: ExpertProducts, beside: Any) -> MixtureForm | None:
        children = dict(block.named_children())
        shared = next((children[name] for name in _SHARED if name in children), None)
        gate = children.get(_SHARED_GATE)
        apart = [each for each in (experts, shared, gate) if each is not None]
        shared_matrices = _shared_matrices(shared if beside is None else beside, experts)
        if shared_matrices is None or (beside is not None and shared is not None):
            return None
        routed = _Routed.of(block, apart, experts.shapes[experts.projections[0]][2])
        tensors = _tensors(block, apart)
        count = products.experts
        routers = [each for each in tensors if tuple(each.shape) == (count, routed.width)]
        vectors = [each for each in tensors if each.numel() == count]
        if len(routers) != 1 or len(routers) + len(vectors) != len(tensors) or len(vectors) > 2:
            return None
        router = routers[0].detach()
        if router.dtype not in ARRAY_DTYPES or not router.is_contiguous():
            return None
        kinds = list(itertools.product(_assignments(vectors), _choices(block)))
        tried = [routed.compared(router, *vectors_of, choice) for vectors_of, choice in kinds]
        wrong, scale = min(tried, key=lambda each: each[0])
        if wrong > _TIES:
            _logger.info("%s: the routing is of no known kind; its layer is not fused", experts.path)
            return None
        (bias, correction), choice = kinds[tried.index((wrong, scale))]
        gates = None if gate is None else gate.weight
        # Packed weights are no parameter, and never change.
        kept = *vectors, *([gates] if isinstance(gates, nn.Parameter) else [])
        return cls(
            experts, products, bits(router), floats_of(bias), floats_of(correction), np.array(choice, np.int64),
            np.float32(scale), routed.chosen.shape[1], shared_matrices, floats_of(gates), kept, routers[0],
            _named_buffers(block, apart),
        )  # fmt: skip


class _Recorder(nn.Module):
    """Replaces the experts in a trial, and records their inputs."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        self.got = x, chosen, shares
        return torch.zeros_like(x)


class _Nothing(nn.Module):
    """Replaces a shared expert and its gate in a trial."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


@dataclass(frozen=True)
class _Routed:
    """Random rows, and how a block routes them in float32."""

    x: torch.Tensor
    chosen: torch.Tensor
    shares: torch.Tensor

    @property
    def width(self) -> int:
        return self.x.shape[1]

    @classmethod
    def of(cls, block: Any, apart: list[nn.Module], width: int) -> _Routed:
        """Raises ValueError if the experts get something else than the rows."""
        recorder = _Recorder()
        copied = copy.copy(block)
        copied._modules = {
            name: recorder if child is apart[0] else _Nothing() if any(child is each for each in apart)
            else copy.deepcopy(child).float() for name, child in block._modules.items() if child is not None
        }  # fmt: skip
        for kind in ("_parameters", "_buffers"):
            numbers = getattr(block, kind)
            setattr(copied, kind, {name: each if each is None else each.float() for name, each in numbers.items()})
        x = torch.randn(1, _TRIED_ROWS, width, generator=torch.Generator().manual_seed(0))
        copied.forward(x.clone())
        got, chosen, shares = recorder.got
        if not torch.equal(got.reshape(x[0].shape), x[0]) or chosen.shape != shares.shape:
            raise ValueError("the experts get something else than the rows")
        return cls(x[0], chosen.long(), shares.float())

    def compared(
        self, router: torch.Tensor, bias: torch.Tensor | None, correction: torch.Tensor | None, choice: tuple[int, ...]
    ) -> tuple[int, float]:
        """The number of rows in which this kind of routing chooses other experts, and the factor of its shares.

        All rows count as different if the shares differ.
        """
        kind, groups, kept, counted, normalised = choice
        logits = self.x @ router.float().T + (0 if bias is None else bias.float().flatten())
        scores = logits.sigmoid() if kind == SIGMOID else logits.softmax(dim=1)
        values = scores + (0 if correction is None else correction.float().flatten())
        if groups > 1:
            grouped = values.unflatten(1, (groups, -1))
            best = grouped.topk(counted, dim=2).values.sum(dim=2).topk(kept, dim=1).indices
            left = torch.zeros(len(values), groups, dtype=torch.bool).scatter(1, best, True)
            values = grouped.masked_fill(~left[..., None], float("-inf")).flatten(1)
        mine = values.topk(self.chosen.shape[1], dim=1).indices.sort(dim=1).values
        wrong = int((mine != self.chosen.sort(dim=1).values).any(dim=1).sum())
        shares = scores.gather(1, self.chosen)
        if normalised:
            shares = shares / shares.sum(dim=1, keepdim=True)
        scales = self.shares / shares
        scale = float(scales.median())
        if not float((scales - scale).abs().max()) <= _TOLERANCE * abs(scale):
            wrong = len(self.x)
        return wrong, scale


def _assignments(vectors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The possible assignments of vectors to the router's bias and the correction of scores."""
    padded = [*vectors, None, None][:2]
    yield padded[0], padded[1]
    if vectors:
        yield padded[1], padded[0]


def _choices(block: Any) -> Iterator[tuple[int, ...]]:
    """The known kinds of routing: (kind of scores, groups, groups kept, scores counted, whether normalised)."""
    declared = [(1, 1, 1)]
    for module in block.modules():
        groups = next((getattr(module, name) for name in _GROUPS if isinstance(getattr(module, name, None), int)), 1)
        kept = getattr(module, _KEPT, None)
        if groups > 1 and isinstance(kept, int):
            declared += [(groups, kept, 2), (groups, kept, 1)]
            break
    for kind, group, normalised in itertools.product((SOFTMAX, SIGMOID), reversed(declared), (1, 0)):
        yield kind, *group, normalised


def _named_buffers(block: Any, apart: list[nn.Module]) -> tuple[tuple[dict[str, Any], str, torch.Tensor], ...]:
    """The buffers of `_tensors`, each with the dictionary that has it and its name there."""
    modules = [block, *(part for child in block.children() if child not in apart for part in child.modules())]
    return tuple((each._buffers, *item) for each in modules for item in each._buffers.items() if item[1] is not None)


def _tensors(block: Any, apart: list[nn.Module]) -> list[torch.Tensor]:
    """The parameters and buffers of a block without those of the modules in `apart`."""
    found = [*block._parameters.values(), *block._buffers.values()]
    for child in block.children():
        if not any(child is each for each in apart):
            found += [*child.parameters(), *child.buffers()]
    return [each for each in found if each is not None]


def _shared_matrices(shared: Any, experts: QuantizedExperts) -> np.ndarray | None:
    """The calls of a shared expert's matrices; empty without one, None for an unsupported form."""
    if shared is None:
        return np.empty((0, 5), np.int64)
    mlp = PackedMLP.of(shared)
    if mlp is None or type(mlp.activation) is not type(getattr(experts.wrapped, "act_fn", None)):
        return None
    if mlp.inner % GROUP or mlp.has_gate != experts.form.has_gate or (mlp.gate_factor, mlp.factor) != (1, 1):
        return None
    # Without gates the first matrix is that of the up projection, and the second is not read.
    return mlp.calls if mlp.has_gate else mlp.calls[[0, 0, 1]]
