"""Operators that keep a module's weights quantised, or at 16 bits: what a GGUF file holds stays as it is stored."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from cpu_ops.weight_formats import FORMATS
from hetero_kv.adapter.operator import Operator
from hetero_kv.adapter.weight_settings import AS_STORED, AUTO, BF16, FP32, Q8_0, QUANTISED, WeightSettings
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.weights.quantised_weight import QuantisedWeight, packable, stored_name

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

    from hetero_kv.weights.expert_weights import ExpertWeights

_logger = logging.getLogger(__name__)
# An attribute of a parameter: what was quantised from it, as long as that is in use.
_QUANTISED_AS = "_hetero_kv_quantised"
_DTYPES = {FP32: torch.float32, BF16: torch.bfloat16}


class QuantizedModule(Operator):
    """A module whose weights are kept quantised where the settings say so."""

    settings_class = WeightSettings
    prefills_exactly = True
    continues_exactly = True
    wrapped: Any
    dtype: torch.dtype

    @classmethod
    def is_wanted(cls, module: Any, settings: Any) -> bool:
        """Whether there is anything to do: weights that are loaded as numbers stay so unless another type is asked."""
        parameter = cls.parameter_of(module)
        if settings.weights in (AUTO, AS_STORED):
            # A model's files may hold numbers, and nothing to be kept as stored (`models/safetensors_weights.py`).
            return parameter.is_meta and not getattr(parameter, "comes_as_numbers", False)
        return _DTYPES.get(settings.weights) is not parameter.dtype

    @classmethod
    @abstractmethod
    def parameter_of(cls, module: Any) -> nn.Parameter:
        """One of a module's weights that the operator keeps."""

    @abstractmethod
    def held(self) -> Iterator[QuantisedWeight | ExpertWeights]:
        """The weights that are packed now."""

    @abstractmethod
    def weight_sizes(self, stored: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[int, int]:
        """What the weights will take when they are loaded on a CPU: id of the parameter -> bytes.

        Args:
            stored: parameter -> GGML's name of the type that its file holds (`WeightMap.stored_types`).
            dtype: of the model; None for the one it has.
        """

    def waits_for_blocks(self) -> bool:
        """Whether the operator is there for the blocks of a file alone: it leaves numbers as they are."""
        return self.settings.weights in (AUTO, AS_STORED)

    def kept_as(self, stored: str | None, columns: int) -> str | None:
        """The type, by GGML's name, that weights are packed in; None for numbers.

        Args:
            stored: GGML's name of the type that the file holds; None where no file does.
            columns: of the matrix.
        """
        wanted = QUANTISED.get(self.settings.weights)
        stored = stored_name(stored, columns) if stored is not None else None
        if stored is not None and self.waits_for_blocks():
            wanted = stored if packable(stored, columns) else QUANTISED[Q8_0]
        return wanted if wanted is not None and packable(wanted, columns) else None

    def number_type(self, dtype: torch.dtype | None = None) -> torch.dtype:
        """The type of weights that are kept as numbers, in a model of `dtype`; None for the one it has."""
        return _DTYPES.get(self.settings.weights) or dtype or self.dtype

    def converted(self, numbers: torch.Tensor, columns: int) -> torch.Tensor:
        """Weights that are kept as numbers, rows of `columns`, in their type; says so where codes were asked for."""
        if asked := QUANTISED.get(self.settings.weights):
            _logger.warning(
                "%s: rows of %d weights are no whole blocks of %s; they are kept as numbers", self.path, columns, asked
            )
        return numbers.to(self.number_type())

    def require_kernels(self, device: torch.device) -> None:
        """Raise UnsupportedModelError where weights to be quantised lie on another device than a CPU."""
        if device.type != "cpu":
            raise UnsupportedModelError(
                f"{self.path}: weights is {self.settings.weights!r}, and the model computes on {device}, where there "
                "are no kernels for quantised weights; set weights to auto, or device to cpu"
            )

    def warn_of_missing_kernels(self, stored: str, kept: str | None, columns: int) -> None:
        """Say that a file's type `stored` becomes `kept`, where nobody asked for that."""
        if stored_name(stored, columns) is not None and self.waits_for_blocks():
            kept = kept or "numbers"
            _logger.warning("%s: there are no kernels for %s; its weights are kept as %s", self.path, stored, kept)


class QuantizedMatrix(QuantizedModule):
    """A module with one weight matrix, which it keeps quantised where the settings say so.

    Attributes:
        quantised: the matrix; None while the wrapped module has it, as numbers.
    """

    #: The kinds of module that it can stand for; a subclass of theirs computes something else.
    replaces: type[nn.Module]

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.dtype: torch.dtype = self.wrapped.weight.dtype
        self.quantised: QuantisedWeight | None = None
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

    def held(self) -> Iterator[QuantisedWeight]:
        if self.quantised is not None:
            yield self.quantised

    def install(self) -> None:
        if self.quantised is not None:
            self._keep(self.quantised)
        elif not self.wrapped.weight.is_meta:
            parameter = self.wrapped.weight
            wanted = self.kept_as(None, parameter.shape[1])
            # Of tied modules the first one has quantised what is both's.
            noted: weakref.ref[QuantisedWeight] | None = getattr(parameter, _QUANTISED_AS, None)
            tied = noted() if noted is not None else None
            if tied is not None and tied.name == wanted:
                self._keep(tied)
                return
            self._take_numbers(parameter.detach(), wanted)
            if self.quantised is not None:
                setattr(parameter, _QUANTISED_AS, weakref.ref(self.quantised))

    def uninstall(self) -> nn.Module:
        if self.quantised is not None:
            self.wrapped.weight = self.quantised.parameter(self.dtype)
        elif self.wrapped.weight.dtype is not self.dtype:
            self._give(self.wrapped.weight.detach().to(self.dtype))
        return self.wrapped

    def compile_own_kernels(self) -> None:
        if self.quantised is not None:
            self.quantised.compile_kernels(self.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weights as numbers, for a model that reads them itself; unpacked anew at every use."""
        return self.wrapped.weight if self.quantised is None else self.quantised.unpacked(self.dtype)

    def load_blocks(self, blocks: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> None:
        """Take the weights from a GGUF file.

        Args:
            blocks: [rows, bytes of a row] uint8, the file's blocks.
            kind: their type.
            shape: [rows, columns].
        """
        import gguf  # who calls this has read a file with it

        wanted = self.kept_as(kind.name, shape[1])
        if wanted is not None and wanted == kind.name:
            self._keep(QuantisedWeight.of_blocks(blocks, wanted, shape[1]))
            return
        # Numbers of a file are a view of it, and it is mapped and may go: a copy of these.
        unpacked = np.require(gguf.dequantize(blocks, kind), requirements=["W"])
        numbers = torch.from_numpy(unpacked).reshape(shape)
        self.warn_of_missing_kernels(kind.name, wanted, shape[1])
        self._take_numbers(numbers, wanted)

    def load_numbers(self, numbers: torch.Tensor, dtype: torch.dtype) -> None:
        """Take the weights from a file that holds numbers.

        Args:
            numbers: [rows, columns], of the file's type; they are not kept, for the file is mapped and may go.
            dtype: of the model, in which weights are kept that are not quantised.
        """
        wanted = self.kept_as(None, numbers.shape[1])
        self._take_numbers(numbers if wanted is not None else numbers.to(dtype, copy=True), wanted)

    def weight_sizes(self, stored: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[int, int]:
        rows, columns = self.wrapped.weight.shape
        kept = self.kept_as(stored.get(f"{self.path}.weight"), columns)
        size = rows * columns * self.number_type(dtype).itemsize
        if kept is not None:
            size = FORMATS[kept].packed_bytes(rows, columns)
        return {id(self.wrapped.weight): size}

    def share(self, other: QuantizedMatrix) -> bool:
        """Take the weights of `other`, which are tied to these; False where it has none to share."""
        if other.quantised is None:
            return False
        self._keep(other.quantised)
        return True

    def _take_numbers(self, numbers: torch.Tensor, wanted: str | None) -> None:
        """Keep the weights as type `wanted`, or as numbers."""
        if wanted is None:
            self._give(self.converted(numbers, numbers.shape[1]))
            return
        self.require_kernels(numbers.device)
        self._keep(QuantisedWeight.of_numbers(numbers, wanted))

    def _keep(self, quantised: QuantisedWeight) -> None:
        self.quantised, self.packed = quantised, quantised.data
        # A model asks its parameters for their device and dtype: an empty one answers.
        self._give(torch.empty(0, dtype=self.dtype))

    def _give(self, numbers: torch.Tensor) -> None:
        self.wrapped.weight = nn.Parameter(numbers, requires_grad=False)


class QuantizedLinear(QuantizedMatrix):
    """A linear layer over quantised weights.

    Few rows (a decoded token, a batch, a short question) are multiplied with the codes, activations quantised to int8
    in groups of 32; for longer prompts the weights are unpacked, piece by piece, and multiplied in the model's dtype.
    """

    meaning = "a linear layer whose weights stay quantised as their file holds them, or are quantised"
    replaces = nn.Linear

    @classmethod
    def is_wanted(cls, module: nn.Module, settings: Any) -> bool:
        """See `QuantizedModule`; a subclass that computes something else keeps its weights as numbers."""
        return type(module).forward is nn.Linear.forward and super().is_wanted(module, settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features], in x's dtype."""
        quantised = self.quantised
        bias = self.wrapped.bias
        if quantised is None:
            weight = self.wrapped.weight
            y = functional.linear(x.to(weight.dtype), weight).to(x.dtype)
        else:
            y = quantised.multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.wrapped.out_features)
        return y if bias is None else y + bias


class QuantizedEmbedding(QuantizedMatrix):
    """An embedding over quantised weights: a token's row is unpacked when it is looked up."""

    meaning = "an embedding whose weights stay quantised as their file holds them, or are quantised"
    replaces = nn.Embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids of any shape -> [..., embedding_dim], in the model's dtype."""
        if self.quantised is None:
            return self.wrapped(ids).to(self.dtype)
        rows = self.quantised.rows(ids.reshape(-1)).to(self.dtype)
        if type(self.wrapped).forward is not nn.Embedding.forward:
            # A subclass does something with its rows (Gemma scales them): let it, these rows being all that it has.
            self._give(rows)
            rows = self.wrapped(torch.arange(len(rows)))
            self._give(rows[:0])
        return rows.view(*ids.shape, -1)
