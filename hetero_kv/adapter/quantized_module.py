"""Operators that keep a module's weights quantized, or at 16 bits: what a GGUF file holds stays as it is stored."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetero_kv.adapter.foreign import foreign_part
from hetero_kv.adapter.operator import Operator
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
    """A module whose weights are kept quantized where the settings say so.

    While it is in the model, the wrapped module's forward is `computed` too: hooks that somebody puts on the wrapped
    module, as on every `torch.nn.Linear` of a model, are called, and so is a forward that is wrapped around it.
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
        """As `computed`, and what somebody has put on the wrapped module."""
        values = self.wrapped.__dict__
        if values["_forward_hooks"] or values["_forward_pre_hooks"] or values.get("forward") is not self._stand_in:
            return self.wrapped(*args)
        return self.computed(*args)

    @abstractmethod
    def computed(self, *args: Any) -> torch.Tensor:
        """What the wrapped module computes, by the weights as they are kept."""

    def require_empty(self, leaf: str) -> None:
        """Raise UnsupportedModelError where a packed parameter's place is no longer empty, as it was left."""
        left = self.wrapped._parameters.get(leaf)
        if left is None or left.numel() or type(self.wrapped) is not self._kind:
            raise UnsupportedModelError(
                f"the weights of {self.path} were packed, and were replaced or reparametrized afterwards (a "
                "parametrization, pruning); call hetero_kv.eject(model) before such a change"
            )

    def own_forward(self, *args: Any) -> torch.Tensor:
        """What the wrapped module's class computes, by the parameters that the module has now."""
        return type(self.wrapped).forward(self.wrapped, *args)

    def install(self) -> None:
        super().install()
        self.wrapped.__dict__["forward"] = self._stand_in

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `Operator`. Raises UnsupportedModelError while the weights are packed: no tensors of the model's."""
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
        """Whether there is anything to do: weights that are loaded as numbers stay so unless another type is asked."""
        if foreign_part(module) is not None:
            # Weights that are more than the module's parameter (a parametrization, hooks, offloading) stay as they are.
            return False
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
    def packed_weights(self) -> Iterator[PackedWeight | ExpertWeights]:
        """The weights that are packed now."""

    @abstractmethod
    def weight_sizes(self, stored: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[int, int]:
        """What the weights will take when they are loaded: id of the parameter -> bytes.

        Args:
            stored: parameter -> GGML's name of the type that its file holds (`WeightMap.stored_types`).
            dtype: of the model; None for the one it has.
        """

    @abstractmethod
    def packed_shapes(self, stored: Mapping[str, str]) -> Iterator[tuple[int, int]]:
        """[rows, columns] of each matrix that is packed, or will be when the weights are loaded; `stored` as above."""

    def waits_for_blocks(self) -> bool:
        """Whether the operator is there for the blocks of a file alone: it leaves numbers as they are."""
        return self.settings.weights in (AUTO, AS_STORED)

    def kept_as(self, stored: str | None, columns: int) -> str | None:
        """The type, by GGML's name, that weights are packed in; None for numbers.

        Args:
            stored: GGML's name of the type that the file holds; None where no file does.
            columns: of the matrix.
        """
        kept_type = QUANTIZED.get(self.settings.weights)
        stored = stored_name(stored, columns) if stored is not None else None
        if stored is not None and self.waits_for_blocks():
            kept_type = stored if packable(stored, columns) else QUANTIZED[Q8_0]
        return kept_type if kept_type is not None and packable(kept_type, columns) else None

    def number_type(self, dtype: torch.dtype | None = None) -> torch.dtype:
        """The type of weights that are kept as numbers, in a model of `dtype`; None for the one it has."""
        return _DTYPES.get(self.settings.weights) or dtype or self.dtype

    def converted(self, numbers: torch.Tensor, columns: int) -> torch.Tensor:
        """Weights that are kept as numbers, rows of `columns`, in their type; says so where codes were asked for."""
        if asked := QUANTIZED.get(self.settings.weights):
            _logger.warning(
                "%s: rows of %d weights do not divide into blocks of %s; they are kept unquantized",
                self.path,
                columns,
                asked,
            )
        return numbers.to(self.number_type())

    def require_kernels(self, device: torch.device) -> None:
        """Raise UnsupportedModelError where weights to be quantized lie on something else than a CPU or a CUDA GPU."""
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedModelError(
                f"{self.path}: weights is {self.settings.weights!r}, but the model computes on {device}, which has no "
                "kernels for quantized weights; set weights to auto, or device to cpu"
            )

    def kept_otherwise(self, stored: str, kept: str | None, columns: int) -> str | None:
        """What a file's type `stored` becomes for want of kernels; None where the settings ask for that."""
        return (kept or "numbers") if stored_name(stored, columns) is not None and self.waits_for_blocks() else None
