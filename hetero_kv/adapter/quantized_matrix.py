"""Linear layers and embeddings whose weight matrix stays quantized: operators over a single matrix."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hetero_kv.adapter.declarations import QUANTIZED_EMBEDDING, QUANTIZED_LINEAR
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.read_only_weights import ReadOnlyWeight
from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.weights.moving import weight_at, weight_moved
from hetero_kv.weights.packed_weight import PackedWeight
from hetero_kv.weights.quantized_weight import QuantizedWeight, bytes_tensor

if TYPE_CHECKING:
    from hetero_kv.weights.tensor_types import TensorType

# An attribute of a parameter: a weak reference to the matrix that was quantized from it.
_QUANTIZED_AS = "_hetero_kv_quantized"


class QuantizedMatrix(QuantizedModule):
    """A module with one weight matrix, which stays quantized if the settings say so.

    Attributes:
        packed: the matrix's bytes, a buffer; its device computes with the matrix.
        inputs: for each column of the packed matrix, the column of the weights, a buffer; None for the same order.
    """

    #: The class of modules that it can replace; a subclass may compute something else.
    replaces: type[nn.Module]
    packed: torch.Tensor | None
    inputs: torch.Tensor | None

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.dtype: torch.dtype = self.wrapped.weight.dtype
        self._quantized: PackedWeight | None = None
        self.register_buffer("packed", None, persistent=False)
        self.register_buffer("inputs", None, persistent=False)

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        if not isinstance(module, cls.replaces):
            raise UnsupportedModelError(
                f"{path} ({type(module).__name__}) is no torch.nn.{cls.replaces.__name__}; exclude it with `class: "
                "default`"
            )

    @classmethod
    def parameter_of(cls, module: Any) -> nn.Parameter:
        return module.weight

    @property
    def quantized(self) -> PackedWeight | None:
        """The matrix on the present device of its bytes; None while the wrapped module has unpacked weights."""
        if self._quantized is not None:
            self._quantized = weight_at(self._quantized, cast(torch.Tensor, self.packed))
        return self._quantized

    def packed_weights(self) -> Iterator[PackedWeight]:
        if self.quantized is not None:
            yield self.quantized

    def install(self) -> None:
        super().install()
        if self.quantized is not None:
            self.keep(self.quantized, self.inputs)
        elif not self.wrapped.weight.is_meta:
            parameter = self.wrapped.weight
            parameter_dtype = self.kept_as(None, parameter.shape[1])
            # The first of several tied modules has quantized the weights that they share.
            shared: weakref.ref[PackedWeight] | None = getattr(parameter, _QUANTIZED_AS, None)
            tied = shared() if shared is not None else None
            if tied is not None and tied.name == parameter_dtype:
                self.keep(tied)
                return
            self._take_numbers(parameter.detach(), parameter_dtype)
            if self.quantized is not None:
                setattr(parameter, _QUANTIZED_AS, weakref.ref(self.quantized))

    def uninstall(self) -> nn.Module:
        if self.quantized is not None and self.inputs is not None:
            self._give(self.quantized.unpacked(self.dtype)[:, self.inputs.argsort()])
        elif self.quantized is not None:
            self.wrapped.weight = self.quantized.parameter(self.dtype)
        elif self.wrapped.weight.dtype is not self.dtype:
            self._give(self.wrapped.weight.detach().to(self.dtype))
        return super().uninstall()

    def compile_own_kernels(self) -> None:
        if self.quantized is not None:
            self.quantized.compile_kernels(self.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weights as numbers, for a model that reads them itself: unpacked at each use, read-only."""
        quantized = self.quantized
        if quantized is None:
            return self.wrapped.weight
        numbers = quantized.unpacked(self.dtype)
        return ReadOnlyWeight.of(numbers if self.inputs is None else numbers[:, self.inputs.argsort()], self.path)

    def load_blocks(
        self, blocks: np.ndarray, kind: TensorType, shape: tuple[int, ...], columns: np.ndarray | None = None
    ) -> str | None:
        """Load the weights from a GGUF file; returns the type that replaces the file's if that has no kernels.

        Args:
            blocks: [rows, bytes of a row] uint8, the file's blocks.
            kind: their type.
            shape: [rows, columns].
            columns: for each column of the weights, the file's column; None for the same order.
        """
        # Imported here, since only files of blocks need the package gguf.
        from hetero_kv.weights.block_numbers import numbers_of_blocks

        parameter_dtype = self.kept_as(kind.name, shape[1])
        if self.keeps_as_stored(kind.name, shape[1]):
            self._keep_stored(QuantizedWeight.of_blocks(blocks, kind.name, shape[1]), columns)
            return None
        # Unquantized numbers are a view of the mapped file, which may be closed: copy them.
        unpacked = np.require(numbers_of_blocks(blocks, kind), requirements=["W"])
        numbers = torch.from_numpy(unpacked).reshape(shape)
        self._take_numbers(numbers if columns is None else numbers[:, columns], parameter_dtype)
        return self.substituted(kind.name, parameter_dtype, shape[1])

    def load_packed(self, data: np.ndarray, name: str, shape: tuple[int, ...], columns: np.ndarray | None) -> None:
        """Load weights that are packed already: `data`, [bytes] uint8; see `load_blocks`."""
        self._keep_stored(QuantizedWeight.of_bytes(bytes_tensor(data), name, *shape), columns)

    def _keep_stored(self, quantized: PackedWeight, columns: np.ndarray | None) -> None:
        self.keep(quantized, None if columns is None else torch.from_numpy(columns.argsort()))

    def load_numbers(self, numbers: torch.Tensor, dtype: torch.dtype) -> None:
        """Load the weights from a file of unquantized numbers.

        Args:
            numbers: [rows, columns], of the file's type; copied, because the mapped file may be closed.
            dtype: of the model, and of weights that are not quantized.
        """
        parameter_dtype = self.kept_as(None, numbers.shape[1])
        self._take_numbers(numbers if parameter_dtype is not None else numbers.to(dtype, copy=True), parameter_dtype)

    def weight_sizes(self, stored: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[int, int]:
        rows, columns = self.wrapped.weight.shape
        kept = self.kept_as(stored.get(f"{self.path}.weight"), columns)
        size = rows * columns * self.number_type(dtype).itemsize
        if kept is not None:
            size = FORMATS[kept].packed_bytes(rows, columns)
        return {id(self.wrapped.weight): size}

    def packed_shapes(self, stored: Mapping[str, str]) -> Iterator[tuple[int, int]]:
        if self.quantized is not None:
            rows, columns = self.quantized.shape
            yield rows, columns
        elif (weight := self.wrapped.weight).is_meta:
            rows, columns = weight.shape
            if self.kept_as(stored.get(f"{self.path}.weight"), columns) is not None:
                yield rows, columns

    @property
    def keeps_numbers(self) -> bool:
        return self.quantized is None and self.wrapped.weight.dtype is self.dtype

    def expect_weights_in(self, module: Any) -> None:
        if not self.keeps_numbers:
            shape = self.wrapped.weight.shape if self.quantized is None else self.quantized.shape
            module._parameters["weight"] = nn.Parameter(
                torch.empty(shape, dtype=self.dtype, device="meta"), requires_grad=False
            )

    def share_weights(self, other: QuantizedMatrix) -> None:
        if not self.share(other):
            self.wrapped._parameters["weight"] = other.wrapped.weight

    def share(self, other: QuantizedMatrix) -> bool:
        """Share the packed weights of `other`, which are tied to these; False if it has none."""
        if other.quantized is None:
            return False
        self.keep(other.quantized, other.inputs)
        return True

    def _take_numbers(self, numbers: torch.Tensor, parameter_dtype: str | None) -> None:
        """Keep the weights packed as `parameter_dtype`; None keeps them unquantized."""
        if parameter_dtype is None:
            self._give(self.converted(numbers, numbers.shape[1]))
            return
        self.require_kernels(numbers.device)
        quantized = QuantizedWeight.of_numbers(numbers, parameter_dtype)
        self.keep(weight_moved(quantized, lambda packed: packed.to(numbers.device)))

    def keep(self, quantized: PackedWeight, inputs: torch.Tensor | None = None) -> None:
        """Replace the weights by a packed matrix; inputs: see the class."""
        self._quantized, self.packed, self.inputs = quantized, quantized.data, inputs
        # A model reads device and dtype from its parameters: an empty one has both.
        self._give(torch.empty(0, dtype=self.dtype, device=quantized.data.device))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedMatrix:
        """See torch.nn.Module; keeps tied buffers tied, which torch would copy one by one."""
        quantized, self.packed = self.quantized, None
        try:
            super()._apply(fn, recurse)
            self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
            if quantized is not None:
                self._quantized = quantized = weight_moved(quantized, fn)
        finally:
            self.packed = None if quantized is None else quantized.data
        return self

    def _give(self, numbers: torch.Tensor) -> None:
        self.wrapped.weight = nn.Parameter(numbers, requires_grad=False)


class QuantizedLinear(QuantizedMatrix):
    """A linear layer over quantized weights.

    Few rows (a decoded token, a batch, a short question) are multiplied with the packed weights; on a CPU the
    activations are quantized to int8 in groups of 32. For longer prompts the weights are unpacked piece by piece, and
    multiplied in the model's dtype.

    Attributes:
        gives_logits: whether the products are the model's logits. On a CPU those of few rows stay float32.
    """

    meaning = QUANTIZED_LINEAR.meaning
    replaces = nn.Linear
    gives_logits = False

    @classmethod
    def applies(cls, module: nn.Module, settings: Any) -> bool:
        """See `QuantizedModule`; the weights of a subclass with another forward are not packed."""
        return type(module).forward is nn.Linear.forward and super().applies(module, settings)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features], in x's dtype, or float32 for logits."""
        quantized = self.quantized
        bias = self.wrapped.bias
        if quantized is not None:
            self.require_empty("weight")
            if self.inputs is not None:
                x = x[..., self.inputs]
            multiply = quantized.multiply
            if self.gives_logits and isinstance(quantized, QuantizedWeight):
                multiply = quantized.logits
            return multiply(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], self.wrapped.out_features)
        weight = self.wrapped.weight
        y = functional.linear(x.to(weight.dtype), weight).to(x.dtype)
        return y if bias is None else y + bias


class QuantizedEmbedding(QuantizedMatrix):
    """An embedding over quantized weights: a token's row is unpacked when it is looked up."""

    meaning = QUANTIZED_EMBEDDING.meaning
    replaces = nn.Embedding

    @classmethod
    def applies(cls, module: Any, settings: Any) -> bool:
        """See `QuantizedModule`; with `max_norm` a look-up rescales rows in place, so they are not packed."""
        return module.max_norm is None and super().applies(module, settings)

    def computed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids of any shape -> [..., embedding_dim], in the model's dtype."""
        if self.quantized is None:
            return self.own_forward(ids).to(self.dtype)
        self.require_empty("weight")
        rows = self.quantized.rows(ids.reshape(-1), self.dtype)
        if type(self.wrapped).forward is not nn.Embedding.forward:
            # A subclass may process its rows (Gemma scales them): run its forward on these rows alone.
            self._give(rows)
            rows = self.own_forward(torch.arange(len(rows), device=rows.device))
            self._give(rows[:0])
        return rows.view(*ids.shape, -1)
