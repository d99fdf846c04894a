"""Operators over a single quantised weight matrix: linear layers and embeddings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from cpu_ops.weight_formats import FORMATS
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.read_only_numbers import ReadOnlyNumbers
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.weights.moving import weight_at, weight_moved
from hetero_kv.weights.packed_weight import PackedWeight
from hetero_kv.weights.quantised_weight import QuantisedWeight

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

# Attribute of a parameter: a weak reference to the weights that were quantised from it.
_QUANTISED_AS = "_hetero_kv_quantised"


class QuantizedMatrix(QuantizedModule):
    """A module whose one weight matrix stays quantised where the settings say so.

    Attributes:
        packed: the matrix's bytes, a buffer; its device computes the matrix.
    """

    #: The module class that it can replace; subclasses with another forward are excluded.
    replaces: type[nn.Module]
    packed: torch.Tensor | None

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.dtype: torch.dtype = self.wrapped.weight.dtype
        self._quantised: PackedWeight | None = None
        self.register_buffer("packed", None, persistent=False)

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        if not isinstance(module, cls.replaces):
            raise UnsupportedModelError(
                f"{path} ({type(module).__name__}) is no torch.nn.{cls.replaces.__name__}; leave it out with "
                "`class: default`"
            )

    @classmethod
    def parameter_of(cls, module: Any) -> nn.Parameter:
        return module.weight

    @property
    def quantised(self) -> PackedWeight | None:
        """The matrix, on the device of its bytes; None while the wrapped module has it as numbers."""
        if self._quantised is not None:
            self._quantised = weight_at(self._quantised, cast(torch.Tensor, self.packed))
        return self._quantised

    def held(self) -> Iterator[PackedWeight]:
        if self.quantised is not None:
            yield self.quantised

    def install(self) -> None:
        super().install()
        if self.quantised is not None:
            self.keep(self.quantised)
        elif not self.wrapped.weight.is_meta:
            parameter = self.wrapped.weight
            kept = self.kept_as(None, parameter.shape[1])
            # Of tied modules, the first has quantised the weights of both.
            noted: weakref.ref[PackedWeight] | None = getattr(parameter, _QUANTISED_AS, None)
            tied = noted() if noted is not None else None
            if tied is not None and tied.name == kept:
                self.keep(tied)
                return
            self._take_numbers(parameter.detach(), kept)
            if self.quantised is not None:
                setattr(parameter, _QUANTISED_AS, weakref.ref(self.quantised))

    def uninstall(self) -> nn.Module:
        if self.quantised is not None:
            self.wrapped.weight = self.quantised.parameter(self.dtype)
        elif self.wrapped.weight.dtype is not self.dtype:
            self._give(self.wrapped.weight.detach().to(self.dtype))
        return super().uninstall()

    def compile_own_kernels(self) -> None:
        if self.quantised is not None:
            self.quantised.compile_kernels(self.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weights as numbers, for models that read them directly; unpacked at each access, and read-only."""
        quantised = self.quantised
        return (
            self.wrapped.weight if quantised is None else ReadOnlyNumbers.of(quantised.unpacked(self.dtype), self.path)
        )

    def load_blocks(self, blocks: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> None:
        """Load the weights from a GGUF file.

        Args:
            blocks: [rows, bytes of a row] uint8, the file's blocks.
            kind: their type.
            shape: [rows, columns].
        """
        import gguf  # who calls this has read a file with it

        kept = self.kept_as(kind.name, shape[1])
        if kept is not None and kept == kind.name:
            self.keep(QuantisedWeight.of_blocks(blocks, kept, shape[1]))
            return
        # Numbers of a file are a view of its mapping, which may go away: copied.
        unpacked = np.require(gguf.dequantize(blocks, kind), requirements=["W"])
        numbers = torch.from_numpy(unpacked).reshape(shape)
        self.warn_of_missing_kernels(kind.name, kept, shape[1])
        self._take_numbers(numbers, kept)

    def load_numbers(self, numbers: torch.Tensor, dtype: torch.dtype) -> None:
        """Load the weights from a file with numbers.

        Args:
            numbers: [rows, columns], of the file's type; copied, because the file is mapped and may go away.
            dtype: of the model, for weights that are not quantised.
        """
        kept = self.kept_as(None, numbers.shape[1])
        self._take_numbers(numbers if kept is not None else numbers.to(dtype, copy=True), kept)

    def weight_sizes(self, stored: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[int, int]:
        rows, columns = self.wrapped.weight.shape
        kept = self.kept_as(stored.get(f"{self.path}.weight"), columns)
        size = rows * columns * self.number_type(dtype).itemsize
        if kept is not None:
            size = FORMATS[kept].packed_bytes(rows, columns)
        return {id(self.wrapped.weight): size}

    def packed_shapes(self, stored: Mapping[str, str]) -> Iterator[tuple[int, int]]:
        if self.quantised is not None:
            rows, columns = self.quantised.shape
            yield rows, columns
        elif (weight := self.wrapped.weight).is_meta:
            rows, columns = weight.shape
            if self.kept_as(stored.get(f"{self.path}.weight"), columns) is not None:
                yield rows, columns

    def share(self, other: QuantizedMatrix) -> bool:
        """Share the weights of `other`, which are tied to these; returns False when they are not packed."""
        if other.quantised is None:
            return False
        self.keep(other.quantised)
        return True

    def _take_numbers(self, numbers: torch.Tensor, kept: str | None) -> None:
        """Keep the weights as the storage type `kept`, or as numbers."""
        if kept is None:
            self._give(self.converted(numbers, numbers.shape[1]))
            return
        self.require_kernels(numbers.device)
        quantised = QuantisedWeight.of_numbers(numbers, kept)
        self.keep(weight_moved(quantised, lambda packed: packed.to(numbers.device)))

    def keep(self, quantised: PackedWeight) -> None:
        """Replace the weights by a packed matrix."""
        self._quantised, self.packed = quantised, quantised.data
        # An empty parameter gives the model the device and dtype of its weights.
        self._give(torch.empty(0, dtype=self.dtype, device=quantised.data.device))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedMatrix:
        """See torch.nn.Module, which would copy a tied buffer twice."""
        quantised, self.packed = self.quantised, None
        try:
            super()._apply(fn, recurse)
            self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
            if quantised is not None:
                self._quantised = quantised = weight_moved(quantised, fn)
        finally:
            self.packed = None if quantised is None else quantised.data
        return self

    def _give(self, numbers: torch.Tensor) -> None:
        self.wrapped.weight = nn.Parameter(numbers, requires_grad=False)


class QuantizedLinear(QuantizedMatrix):
    """A linear layer over quantised weights.

    Few rows (a decoded token, a batch, a short question) are multiplied with the packed codes, on a CPU with
    activations quantised to int8 in groups of 32. For longer prompts the weights are unpacked piece by piece and
    multiplied in the model's dtype.
    """

    meaning = "a linear layer whose weights stay quantised as their file holds them, or are quantised"
    replaces = nn.Linear

    @classmethod
    def is_wanted(cls, module: nn.Module, settings: Any) -> bool:
        """See `QuantizedModule`; a subclass with another forward keeps its weights as numbers."""
        return type(module).forward is nn.Linear.forward and super().is_wanted(module, settings)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features], in x's dtype."""
        quantised = self.quantised
        bias = self.wrapped.bias
        if quantised is not None:
            self.require_empty("weight")
            return quantised.multiply(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], self.wrapped.out_features)
        weight = self.wrapped.weight
        y = functional.linear(x.to(weight.dtype), weight).to(x.dtype)
        return y if bias is None else y + bias


class QuantizedEmbedding(QuantizedMatrix):
    """An embedding over quantised weights: a token's row is unpacked when it is looked up."""

    meaning = "an embedding whose weights stay quantised as their file holds them, or are quantised"
    replaces = nn.Embedding

    @classmethod
    def is_wanted(cls, module: Any, settings: Any) -> bool:
        """See `QuantizedModule`; weights that lookups rescale in place (`max_norm`) stay numbers."""
        return module.max_norm is None and super().is_wanted(module, settings)

    def computed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids of any shape -> [..., embedding_dim], in the model's dtype."""
        if self.quantised is None:
            return self.own_forward(ids).to(self.dtype)
        self.require_empty("weight")
        rows = self.quantised.rows(ids.reshape(-1), self.dtype)
        if type(self.wrapped).forward is not nn.Embedding.forward:
            # A subclass processes its rows (Gemma scales them): run its forward with these rows as the only weights.
            self._give(rows)
            rows = self.own_forward(torch.arange(len(rows), device=rows.device))
            self._give(rows[:0])
        return rows.view(*ids.shape, -1)
