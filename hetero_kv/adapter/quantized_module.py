"""Operators that keep a module's weights as a GGUF file stores them: quantized, or in 16 bits."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetero_kv.adapter.foreign import foreign_part
from hetero_kv.adapter.replacement import Operator
from hetero_kv.adapter.weight_settings import AS_STORED, AUTO, BF16, FP32, Q8_0, QUANTIZED, WeightSettings
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.weights.packed_weight import PackedWeight
from hetero_kv.weights.quantized_weight import packable, stored_name

if TYPE_CHECKING:
    from hetero_kv.weights.expert_weights import ExpertWeights

_logger = logging.getLogger(__name__)
_DTYPES = {FP32: torch.float32, BF16: torch.bfloat16}


class QuantizedModule(Operator):
    """A module whose weights stay quantized if the settings say so.

    While the operator is in the model, `computed` is also the forward of the wrapped module, so that hooks of the
    wrapped module run, and so does a forward that another library wraps around it.
    """

    settings_class = WeightSettings
    prefills_exactly = True
    continues_exactly = True
    wrapped: Any
    dtype: torch.dtype

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self._stand_in = self.computed
        self._kind = type(wrapped)
        self.register_load_state_dict_pre_hook(lambda module, *_: module._require_numbers("be loaded"))

    def forward(self, *args: Any) -> torch.Tensor:
        """As `computed`; runs hooks and forwards that others have put on the wrapped module."""
        values = self.wrapped.__dict__
        if values["_forward_hooks"] or values["_forward_pre_hooks"] or values.get("forward") is not self._stand_in:
            return self.wrapped(*args)
        return self.computed(*args)

    @abstractmethod
    def computed(self, *args: Any) -> torch.Tensor:
        """The wrapped module's output, computed from the weights as this operator keeps them."""

    def require_empty(self, leaf: str) -> None:
        """Raise UnsupportedModelError if the empty parameter in place of a packed one was replaced."""
        left = self.wrapped._parameters.get(leaf)
        if left is None or left.numel() or type(self.wrapped) is not self._kind:
            raise UnsupportedModelError(
                f"the weights of {self.path} were packed, and were replaced or reparametrized afterwards (a "
                "parametrization, pruning); call hetero_kv.eject(model) before such a change"
            )

    def own_forward(self, *args: Any) -> torch.Tensor:
        """The output of the wrapped module's class for the module's present parameters."""
        return type(self.wrapped).forward(self.wrapped, *args)

    def install(self) -> None:
        super().install()
        self.wrapped.__dict__["forward"] = self._stand_in

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `Operator`. Raises UnsupportedModelError while the weights are packed, because they are no tensors."""
        self._require_numbers("be read")
        return super().state_dict(*args, **kwargs)

    def _require_numbers(self, done: str) -> None:
        if any(True for _ in self.packed_weights()):
            raise UnsupportedModelError(
                f"the weights of {self.path} are packed and cannot {done} as a state dict (save_pretrained, "
                "push_to_hub, load_state_dict); call hetero_kv.eject(model) first, which unpacks them"
            )

    def require_removable(self) -> None:
        if self.wrapped.__dict__.get("forward") is not self._stand_in:
            raise UnsupportedModelError(
                f"the forward of {self.path}.wrapped was replaced after inject; undo that first (for example by "
                "accelerate.hooks.remove_hook_from_module)"
            )

    def uninstall(self) -> nn.Module:
        self.wrapped.__dict__.pop("forward", None)
        return super().uninstall()

    @classmethod
    def applies(cls, module: Any, settings: Any) -> bool:
        """Whether the settings change this module's weights: loaded numbers change only if the settings name a type."""
        if foreign_part(module) is not None:
            # A parametrization, hooks or offloading may read the parameter, so it must not be packed.
            return False
        parameter = cls.parameter_of(module)
        if settings.weights in (AUTO, AS_STORED):
            # A model's files may hold numbers only, which are not packed (`models/safetensors_weights.py`).
            return parameter.is_meta and not getattr(parameter, "comes_as_numbers", False)
        return _DTYPES.get(settings.weights) is not parameter.dtype

    @classmethod
    @abstractmethod
    def parameter_of(cls, module: Any) -> nn.Parameter:
        """One of the module's parameters that the operator keeps."""

    @abstractmethod
    def packed_weights(self) -> Iterator[PackedWeight | ExpertWeights]:
        """The weights that are packed now."""

    @property
    def keeps_numbers(self) -> bool:
        """Whether its weights are the wrapped module's own numbers, unpacked."""
        return False

    @abstractmethod
    def expect_weights_in(self, module: Any) -> None:
        """Remove the weights of a copy of the wrapped module: parameters on the meta device, as before loading."""

    @abstractmethod
    def share_weights(self, other: Any) -> None:
        """Share the weights of `other`, an operator of this class, in the same memory.

        The wrapped module is as `other.expect_weights_in` left it.
        """

    @abstractmethod
    def weight_sizes(self, stored: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[int, int]:
        """The memory of the weights once they are loaded: id of the parameter -> bytes.

        Args:
            stored: parameter -> GGML's name of its type in the file (`WeightMap.stored_types`).
            dtype: of the model; None for the one it has.
        """

    @abstractmethod
    def packed_shapes(self, stored: Mapping[str, str]) -> Iterator[tuple[int, int]]:
        """[rows, columns] of each matrix that is packed, or will be when the weights are loaded; `stored` as above."""

    def waits_for_blocks(self) -> bool:
        """Whether the operator packs only the blocks of a file, and leaves numbers unquantized."""
        return self.settings.weights in (AUTO, AS_STORED)

    def kept_as(self, stored: str | None, columns: int) -> str | None:
        """GGML's name of the type that weights are packed in; None if they are not packed.

        Args:
            stored: GGML's name of the type in the file; None without a file.
            columns: of the matrix.
        """
        parameter_dtype = QUANTIZED.get(self.settings.weights)
        stored = stored_name(stored, columns) if stored is not None else None
        if stored is not None and self.waits_for_blocks():
            parameter_dtype = stored if packable(stored, columns) else QUANTIZED[Q8_0]
        return parameter_dtype if parameter_dtype is not None and packable(parameter_dtype, columns) else None

    def keeps_as_stored(self, stored: str, columns: int) -> bool:
        """Whether weights of GGML's type `stored` are packed as that type; see `kept_as`."""
        return self.kept_as(stored, columns) == stored

    def number_type(self, dtype: torch.dtype | None = None) -> torch.dtype:
        """The dtype of weights that are not packed, in a model of `dtype`; None stands for the module's own dtype."""
        return _DTYPES.get(self.settings.weights) or dtype or self.dtype

    def converted(self, numbers: torch.Tensor, columns: int) -> torch.Tensor:
        """Convert weights in rows of `columns` that are not packed; warns if the settings request a quantized type."""
        if requested := QUANTIZED.get(self.settings.weights):
            _logger.warning(
                "%s: rows of %d weights do not divide into blocks of %s; they are kept unquantized",
                self.path,
                columns,
                requested,
            )
        return numbers.to(self.number_type())

    def require_kernels(self, device: torch.device) -> None:
        """Raise UnsupportedModelError unless `device`, which has the weights to quantize, is a CPU or a CUDA GPU."""
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedModelError(
                f"{self.path}: weights is {self.settings.weights!r}, but the model computes on {device}, which has no "
                "kernels for quantized weights; set weights to auto, or device to cpu"
            )

    def substituted(self, stored: str, kept: str | None, columns: int) -> str | None:
        """The type that replaces the file's type `stored`, which has no kernels; None if the settings request it."""
        return (kept or "numbers") if stored_name(stored, columns) is not None and self.waits_for_blocks() else None
