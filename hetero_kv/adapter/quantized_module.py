"""Operators that keep a module's weights quantised, or in 16 bits: blocks of a GGUF file stay as stored."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetero_kv.adapter.foreign import foreign_part
from hetero_kv.adapter.operator import Operator
from hetero_kv.adapter.weight_settings import AS_STORED, AUTO, BF16, FP32, Q8_0, QUANTISED, WeightSettings
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.weights.packed_weight import PackedWeight
from hetero_kv.weights.quantised_weight import packable, stored_name

if TYPE_CHECKING:
    from hetero_kv.weights.expert_weights import ExpertWeights

_logger = logging.getLogger(__name__)
_DTYPES = {FP32: torch.float32, BF16: torch.bfloat16}


class QuantizedModule(Operator):
    """A module whose weights stay quantised where the settings say so.

    While it is in the model, the wrapped module's forward is `computed` too. So hooks on the wrapped module, such as
    hooks on every `torch.nn.Linear`, are called, and so is a forward that is wrapped around it.
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
        """As `computed`, including hooks and wrappers that others have put on the wrapped module."""
        values = self.wrapped.__dict__
        if values["_forward_hooks"] or values["_forward_pre_hooks"] or values.get("forward") is not self._stand_in:
            return self.wrapped(*args)
        return self.computed(*args)

    @abstractmethod
    def computed(self, *args: Any) -> torch.Tensor:
        """The wrapped module's output, computed from the weights as they are stored."""

    def require_empty(self, leaf: str) -> None:
        """Raise UnsupportedModelError when the placeholder of packed weights has been replaced."""
        placeholder = self.wrapped._parameters.get(leaf)
        if placeholder is None or placeholder.numel() or type(self.wrapped) is not self._kind:
            raise UnsupportedModelError(
                f"the weights of {self.path} are packed, and since then others stand in their place, or something "
                "that makes others of them (a parametrization, pruning); call hetero_kv.eject(model) before that"
            )

    def own_forward(self, *args: Any) -> torch.Tensor:
        """The forward of the wrapped module's class, with the module's present parameters."""
        return type(self.wrapped).forward(self.wrapped, *args)

    def install(self) -> None:
        super().install()
        self.wrapped.__dict__["forward"] = self._stand_in

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `Operator`. Raises UnsupportedModelError while weights are packed, which are no tensors of the model."""
        self._require_numbers("be had")
        return super().state_dict(*args, **kwargs)

    def _require_numbers(self, done: str) -> None:
        if any(True for _ in self.held()):
            raise UnsupportedModelError(
                f"the weights of {self.path} are packed, and cannot {done} as a state dict (save_pretrained, "
                "push_to_hub, load_state_dict); call hetero_kv.eject(model) first, which unpacks them"
            )

    def require_removable(self) -> None:
        if self.wrapped.__dict__.get("forward") is not self._stand_in:
            raise UnsupportedModelError(
                f"the forward of {self.path}.wrapped was replaced after inject; take that back first "
                "(accelerate.hooks.remove_hook_from_module, say)"
            )

    def uninstall(self) -> nn.Module:
        self.wrapped.__dict__.pop("forward", None)
        return super().uninstall()

    @classmethod
    def is_wanted(cls, module: Any, settings: Any) -> bool:
        """Whether the operator changes anything: loaded numbers stay unless the settings name another type."""
        if foreign_part(module) is not None:
            # Weights that are not a plain parameter (a parametrization, hooks, offloading) stay unchanged.
            return False
        parameter = cls.parameter_of(module)
        if settings.weights in (AUTO, AS_STORED):
            # A model's files may have plain numbers, without blocks to keep as stored
            # (`models/safetensors_weights.py`).
            return parameter.is_meta and not getattr(parameter, "comes_as_numbers", False)
        return _DTYPES.get(settings.weights) is not parameter.dtype

    @classmethod
    @abstractmethod
    def parameter_of(cls, module: Any) -> nn.Parameter:
        """One of a module's weights that the operator stores."""

    @abstractmethod
    def held(self) -> Iterator[PackedWeight | ExpertWeights]:
        """The weights that are packed at present."""

    @abstractmethod
    def weight_sizes(self, stored: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[int, int]:
        """The memory of the weights once they are loaded: id of the parameter -> bytes.

        Args:
            stored: parameter -> GGML's name of the type in its file (`WeightMap.stored_types`).
            dtype: of the model; None for its present one.
        """

    @abstractmethod
    def packed_shapes(self, stored: Mapping[str, str]) -> Iterator[tuple[int, int]]:
        """[rows, columns] of each matrix that is packed, or will be once loaded; `stored` as in `weight_sizes`."""

    def waits_for_blocks(self) -> bool:
        """Whether the operator only keeps quantised blocks of a file, and leaves numbers unchanged."""
        return self.settings.weights in (AUTO, AS_STORED)

    def kept_as(self, stored: str | None, columns: int) -> str | None:
        """The type, by GGML's name, in which weights are packed; None for numbers.

        Args:
            stored: GGML's name of the type in the file; None without a file.
            columns: of the matrix.
        """
        name = QUANTISED.get(self.settings.weights)
        stored = stored_name(stored, columns) if stored is not None else None
        if stored is not None and self.waits_for_blocks():
            name = stored if packable(stored, columns) else QUANTISED[Q8_0]
        return name if name is not None and packable(name, columns) else None

    def number_type(self, dtype: torch.dtype | None = None) -> torch.dtype:
        """The dtype of weights that stay numbers, in a model of `dtype`; None for its present one."""
        return _DTYPES.get(self.settings.weights) or dtype or self.dtype

    def converted(self, numbers: torch.Tensor, columns: int) -> torch.Tensor:
        """Weights as numbers of their dtype, in rows of `columns`; warns if the settings request a quantised type."""
        if name := QUANTISED.get(self.settings.weights):
            _logger.warning(
                "%s: rows of %d weights are no whole blocks of %s; they are kept as numbers", self.path, columns, name
            )
        return numbers.to(self.number_type())

    def require_kernels(self, device: torch.device) -> None:
        """Raise UnsupportedModelError when weights to be quantised are on neither a CPU nor a CUDA GPU."""
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedModelError(
                f"{self.path}: weights is {self.settings.weights!r}, and the model computes on {device}, where there "
                "are no kernels for quantised weights; set weights to auto, or device to cpu"
            )

    def warn_of_missing_kernels(self, stored: str, kept: str | None, columns: int) -> None:
        """Warn that a file's type `stored` becomes `kept`, unless the settings request a type."""
        if stored_name(stored, columns) is not None and self.waits_for_blocks():
            kept = kept or "numbers"
            _logger.warning("%s: there are no kernels for %s; its weights are kept as %s", self.path, stored, kept)
