"""The experts of a mixture with quantized weights: a token reads only the experts that it is routed to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter.declarations import QUANTIZED_EXPERTS
from hetero_kv.adapter.experts_in_dram import ExpertsInDram, ExpertTraffic
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.routed_experts import RoutedExperts
from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.settings.engine_settings import DRAM, EngineSettings
from hetero_kv.weights.expert_weights import ExpertNumbers, ExpertWeights
from hetero_kv.weights.experts_form import ExpertsForm, has_known_experts
from hetero_kv.weights.quantized_weight import bytes_tensor

if TYPE_CHECKING:
    from hetero_kv.weights.tensor_types import TensorType

_logger = logging.getLogger(__name__)
# The outputs of gate and up projections that alternate, output by output.
_ALTERNATING = slice(0, None, 2), slice(1, None, 2)


class QuantizedExperts(QuantizedModule):
    """The experts of a mixture: modules of a known `ExpertsForm`, such as Mixtral's, Qwen's, gpt-oss's and Llama 4's.

    `RoutedExperts` computes with packed weights, the wrapped module's own forward with unpacked ones. `ExpertsInDram`
    computes with both if they are in DRAM and the model computes on a GPU.

    Attributes:
        form: how the wrapped module lays out its weights.
        parts: projection -> slices of its outputs, and their weights: one for the whole projection, or gate and up
            separately as in a GGUF file. Empty while the wrapped module has unpacked weights.
    """

    meaning = QUANTIZED_EXPERTS.meaning

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        form = ExpertsForm.of(wrapped)
        assert form is not None  # by `applies`
        self.form = form
        self.projections = ("gate_up_proj" if form.has_gate else "up_proj", "down_proj")
        first = getattr(wrapped, self.projections[0])
        self.dtype: torch.dtype = first.dtype
        #: Projection -> [experts, outputs, inputs], also if the module stores the transpose.
        self.shapes = {leaf: tuple(self.by_output(getattr(wrapped, leaf).detach()).shape) for leaf in self.projections}
        self.parts: dict[str, list[tuple[slice, ExpertWeights]]] = {leaf: [] for leaf in self.projections}
        #: Computes with the packed weights.
        self.routed = RoutedExperts(self)
        #: Computes with weights in DRAM; set once the operators are in the model.
        self._in_dram: ExpertsInDram | None = None
        #: The GPU from which the weights were moved to DRAM.
        self._moved_from: torch.device | None = None

    @classmethod
    def applies(cls, module: Any, settings: Any) -> bool:
        """See `QuantizedModule`; does not apply to a list of separate expert modules."""
        return has_known_experts(module) and super().applies(module, settings)

    @classmethod
    def parameter_of(cls, module: Any) -> nn.Parameter:
        return module.down_proj

    def install(self) -> None:
        self._pack()
        if self.engine.experts_device == DRAM and self.down.device.type == "cuda":
            self._moved_from = self.down.device
            super()._apply(torch.Tensor.cpu)
            # Nothing references the former bytes.
            for _ in self.packed_weights():
                pass

    def _pack(self) -> None:
        super().install()
        for leaf in self.projections:
            if self.parts[leaf]:
                self._give(leaf, self._nothing(leaf))
        numbers = {leaf: getattr(self.wrapped, leaf).detach() for leaf in self.projections if not self.parts[leaf]}
        if any(tensor.is_meta for tensor in numbers.values()) or not numbers:
            return
        kept_types = [self.kept_as(None, self.shapes[leaf][2]) for leaf in numbers]
        for leaf, name in zip(list(numbers), kept_types, strict=True):
            tensor = numbers.pop(leaf)
            if name is None or None in kept_types:
                self._give(leaf, self.converted(tensor, self.shapes[leaf][2]))
                continue
            self.require_kernels(tensor.device)
            alternates = leaf == self.projections[0] and self.form.has_gate and not self.form.is_concatenated
            for outputs in _ALTERNATING if alternates else [slice(None)]:
                self._keep(leaf, outputs, ExpertWeights.of_numbers(self.by_output(tensor)[:, outputs], name))

    def uninstall(self) -> nn.Module:
        for leaf in self.projections:
            if self.parts[leaf]:
                self._give(leaf, self._unpacked(leaf))
            elif not (parameter := getattr(self.wrapped, leaf)).is_meta and parameter.dtype is not self.dtype:
                self._give(leaf, parameter.detach().to(self.dtype))
        if self._in_dram is not None:
            self._in_dram.end()
        if self._moved_from is not None:
            self.wrapped.to(self._moved_from)
        return super().uninstall()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedExperts:
        """See torch.nn.Module. Weights that belong in DRAM stay there when the model moves to a GPU."""
        super()._apply(_staying(fn) if self.engine.experts_device == DRAM else fn, recurse)
        return self

    @property
    def down(self) -> torch.Tensor:
        """The weights of the last projection, or the packed bytes of its first part."""
        leaf = self.projections[1]
        tensor: torch.Tensor = getattr(self, f"{leaf}_packed_0") if self.parts[leaf] else getattr(self.wrapped, leaf)
        return tensor

    @classmethod
    def configure_together(cls, model: nn.Module, operators: Sequence[QuantizedExperts]) -> None:
        """Configure the experts of a model together, whose forwards run one after the other."""
        traffic = ExpertTraffic()
        for operator in operators:
            block = model.get_submodule(operator.path.rpartition(".")[0])
            operator._in_dram = ExpertsInDram(operator, traffic, block)

    @property
    def keeps_numbers(self) -> bool:
        is_packed = any(self.parts.values())
        return not is_packed and all(getattr(self.wrapped, leaf).dtype is self.dtype for leaf in self.projections)

    def compile_own_kernels(self) -> None:
        for weights in self.packed_weights():
            weights.experts[0].compile_kernels(self.dtype)
        if all(weights.data.device.type == "cpu" for weights in self.packed_weights()):
            self.routed.products()

    def packed_weights(self) -> Iterator[ExpertWeights]:
        return (weights for leaf in self.projections for _, weights in self.parts_of(leaf))

    def packed_shapes(self, stored: Mapping[str, str]) -> Iterator[tuple[int, int]]:
        for leaf, (_, rows, columns) in self.shapes.items():
            is_meta = getattr(self.wrapped, leaf).is_meta
            kept = self._kept(leaf, stored) if is_meta else [weights.name for _, weights in self.parts[leaf]]
            yield from ((rows // len(kept), columns) for name in kept if name is not None)

    def _kept(self, leaf: str, stored: Mapping[str, str]) -> list[str | None]:
        """The types of a projection's parts; see `kept_as`. If one is not packed, none is."""
        place, columns = f"{self.path}.{leaf}", self.shapes[leaf][2]
        names: list[str | None] = [stored[f"{place}.{part}"] for part in ("gate", "up") if f"{place}.{part}" in stored]
        kept = [self.kept_as(name, columns) for name in names or [stored.get(place)]]
        return [None] if None in kept else kept

    def matrices_of(self, leaf: str) -> Sequence[tuple[slice, ExpertWeights | ExpertNumbers]]:
        """A projection's parts, or its unpacked weights as one part."""
        if self.parts[leaf]:
            return self.parts_of(leaf)
        return [(slice(None), ExpertNumbers(self.by_output(getattr(self.wrapped, leaf))))]

    def biases_of(self, leaf: str) -> torch.Tensor:
        """A projection's biases [experts, outputs], if the form has any."""
        biases: torch.Tensor = getattr(self.wrapped, f"{leaf}_bias")
        return biases

    def expect_weights_in(self, module: Any) -> None:
        if self.keeps_numbers:
            return
        for leaf, (experts, rows, columns) in self.shapes.items():
            shape = (experts, columns, rows) if self.form.is_transposed else (experts, rows, columns)
            empty = torch.empty(shape, dtype=self.dtype, device="meta")
            module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)

    def share_weights(self, other: QuantizedExperts) -> None:
        for leaf in self.projections:
            parts = other.parts_of(leaf)
            for outputs, weights in parts:
                self._keep(leaf, outputs, weights)
            if not parts:
                self.wrapped._parameters[leaf] = getattr(other.wrapped, leaf)

    def weight_sizes(self, stored: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[int, int]:
        sizes = {}
        for leaf, (experts, rows, columns) in self.shapes.items():
            kept = self._kept(leaf, stored)
            share = rows // len(kept)
            sizes[id(getattr(self.wrapped, leaf))] = experts * sum(
                FORMATS[name].packed_bytes(share, columns)
                if name is not None
                else share * columns * self.number_type(dtype).itemsize
                for name in kept
            )
        return sizes

    def load_experts(
        self, leaf: str, outputs: slice, blocks: np.ndarray, kind: TensorType, shape: tuple[int, ...]
    ) -> str | None:
        """Load some or all outputs of a projection from a GGUF file; returns the type that replaces the file's, if any.

        Args:
            leaf: the projection's parameter.
            outputs: the outputs that the blocks belong to.
            blocks: [experts, outputs, bytes of a row] uint8, the file's blocks.
            kind: their type.
            shape: [experts, outputs, inputs].
        """
        # Imported here, since only files of blocks need the package gguf.
        from hetero_kv.weights.block_numbers import numbers_of_blocks

        # A projection of which another part is numbers is numbers.
        is_packed = bool(self.parts[leaf]) or getattr(self.wrapped, leaf).is_meta
        parameter_dtype = self.kept_as(kind.name, shape[2]) if is_packed else None
        if is_packed and self.keeps_as_stored(kind.name, shape[2]):
            self._keep(leaf, outputs, ExpertWeights.of_blocks(blocks, kind.name, shape[2]))
            return None
        unpacked = np.require(numbers_of_blocks(blocks, kind), requirements=["W"])
        numbers = torch.from_numpy(unpacked).reshape(shape)
        if parameter_dtype is not None:
            self._keep(leaf, outputs, ExpertWeights.of_numbers(numbers, parameter_dtype))
            return self.substituted(kind.name, parameter_dtype, shape[2])
        if self.parts[leaf]:
            self._give(leaf, self._unpacked(leaf).to(self.number_type()))
            self._forget(leaf)
        elif getattr(self.wrapped, leaf).is_meta:
            self._give(leaf, torch.empty(getattr(self.wrapped, leaf).shape, dtype=self.number_type()))
        self.by_output(getattr(self.wrapped, leaf).data)[:, outputs] = numbers.to(self.number_type())
        return self.substituted(kind.name, parameter_dtype, shape[2])

    def load_packed(self, leaf: str, outputs: slice, data: np.ndarray, name: str, shape: tuple[int, ...]) -> None:
        """Load weights that are packed already: `data`, [bytes] uint8; see `load_experts`."""
        experts, rows, columns = shape
        self._keep(leaf, outputs, ExpertWeights(bytes_tensor(data).view(experts, -1), name, rows, columns))

    def computed(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        """The wrapped module's output.

        Args:
            x: hidden states [tokens, hidden]; [experts × tokens, hidden] if the form takes all rows.
            routing: each token's experts and their weights, [tokens, k] both; nothing if the form takes all rows.
        """
        is_packed = all(self.parts.values())
        for leaf in self.projections if is_packed else ():
            self.require_empty(leaf)
        if x.device.type == "cuda" and self.down.device.type == "cpu":
            assert self._in_dram is not None
            return self._in_dram(x, *routing)
        if not is_packed:
            return self._in_numbers(x, *routing)
        return self.of_all_rows(x) if self.form.takes_all_rows else self.routed(x, *routing)

    def of_all_rows(self, x: torch.Tensor) -> torch.Tensor:
        """As `computed`, for every token scaled for each expert: the output of a row of zeros is zeros."""
        experts = torch.arange(self.wrapped.num_experts, device=x.device)
        chosen = experts.repeat_interleave(len(x) // len(experts))[:, None]
        if x.device.type != "cpu":
            # Which rows are zeros is not read back.
            return self.routed(x, chosen, torch.ones_like(chosen, dtype=x.dtype))
        (rows,) = (x != 0).any(dim=1).nonzero(as_tuple=True)
        out = torch.zeros_like(x)
        if len(rows):
            out[rows] = self.routed(x[rows], chosen[rows], torch.ones((len(rows), 1), dtype=x.dtype))
        return out

    def _in_numbers(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        """The output of the wrapped module's own forward, for unpacked weights."""
        for leaf in self.projections:
            if self.parts[leaf]:
                _logger.warning("%s: one projection is kept unquantized, so %s is too", self.path, leaf)
                self._give(leaf, self._unpacked(leaf))
                self._forget(leaf)
        dtype = getattr(self.wrapped, self.projections[0]).dtype
        *chosen, shares = routing or (x,)
        others = (*chosen, shares.to(dtype)) if routing else ()
        return self.own_forward(x.to(dtype), *others).to(x.dtype)

    def _keep(self, leaf: str, outputs: slice, weights: ExpertWeights) -> None:
        self.register_buffer(f"{leaf}_packed_{len(self.parts[leaf])}", weights.data, persistent=False)
        self.parts[leaf].append((outputs, weights))
        rows = self.shapes[leaf][1]
        if sum(len(range(rows)[outputs]) for outputs, _ in self.parts[leaf]) == rows:
            self._give(leaf, self._nothing(leaf))

    def parts_of(self, leaf: str) -> list[tuple[slice, ExpertWeights]]:
        """A projection's parts on the present device of their bytes."""
        parts = self.parts[leaf]
        for number, (outputs, weights) in enumerate(parts):
            parts[number] = outputs, weights.at(getattr(self, f"{leaf}_packed_{number}"))
        return parts

    def _nothing(self, leaf: str) -> torch.Tensor:
        """An empty tensor with the device and dtype of a projection's weights, a placeholder while they are packed."""
        return torch.empty(0, dtype=self.dtype, device=self.parts[leaf][0][1].data.device)

    def _forget(self, leaf: str) -> None:
        for number in range(len(self.parts[leaf])):
            delattr(self, f"{leaf}_packed_{number}")
        self.parts[leaf] = []

    def _unpacked(self, leaf: str) -> torch.Tensor:
        """A projection's weights, unpacked, in the wrapped module's layout."""
        experts, rows, columns = self.shapes[leaf]
        shape = (experts, columns, rows) if self.form.is_transposed else (experts, rows, columns)
        parts = self.parts_of(leaf)
        numbers = torch.empty(shape, dtype=self.dtype, device=parts[0][1].data.device)
        for outputs, weights in parts:
            for room, expert in zip(self.by_output(numbers), weights.experts, strict=True):
                room[outputs] = expert.unpacked(self.dtype)
        return numbers

    def by_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in a projection's layout, as [experts, outputs, inputs]."""
        return tensor.transpose(1, 2) if self.form.is_transposed else tensor

    def _give(self, leaf: str, numbers: torch.Tensor) -> None:
        setattr(self.wrapped, leaf, nn.Parameter(numbers, requires_grad=False))


def _staying(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`fn` for tensors that stay on their device; where it moves them, it changes their dtype alone."""

    def applied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return fn(tensor)
        like = fn(tensor.new_empty(0))
        return fn(tensor) if like.device.type == tensor.device.type else tensor.to(like.dtype)

    return applied


def parameters_beside_experts(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module without those of experts in DRAM whose operator computes them for a GPU."""
    experts = {
        id(parameter)
        for each in module.modules()
        if isinstance(each, QuantizedExperts) and each.down.device.type == "cpu"
        for parameter in each.parameters()
    }
    return (parameter for parameter in module.parameters() if id(parameter) not in experts)
