"""Loads the expert tensors of a mixture (MoE) from a GGUF file.

GGUF has one tensor per projection for all experts, `blk.N.ffn_{gate,up,down}_exps`, [experts, outputs, inputs]; newer
files may merge gate and up. In transformers the experts' parameters belong to one module, of which `ExpertsForm` says
whether gate and up are concatenated or interleaved, and whether inputs are the first dimension.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.models.gguf.file import GGUFFile, TensorInfo
from hetero_kv.models.gguf.shapes import require_shape
from hetero_kv.models.parameters import set_parameter
from hetero_kv.weights.block_numbers import numbers_of_blocks
from hetero_kv.weights.experts_form import ExpertsForm

_NAME = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<part>gate|up|down|gate_up)_exps\.(?P<kind>weight|bias)")
_MODULE = re.compile(r"\.layers\.(?P<layer>\d+)\.(.+\.)?experts$")


@dataclass(frozen=True)
class ExpertPlace:
    """The parameter, or the part of it, that an expert tensor fills.

    Attributes:
        module: path of the experts' module.
        leaf: the parameter's name in the module.
        part: "gate" or "up" if the parameter contains both; "" for a whole parameter.
        outputs: the parameter's outputs that the tensor fills.
        is_transposed: whether the parameter's inputs are before its outputs.
    """

    module: str
    leaf: str
    part: str
    outputs: slice
    is_transposed: bool

    @property
    def parameter(self) -> str:
        """The parameter's path."""
        return f"{self.module}.{self.leaf}"


def expert_places(model: nn.Module, file: GGUFFile) -> dict[str, ExpertPlace]:
    """GGUF tensor name -> its place, for the expert tensors that the model has a place for."""
    modules: dict[str, tuple[str, Any, ExpertsForm]] = {
        match["layer"]: (path.replace(".wrapped", ""), module, form)
        for path, module in model.named_modules()
        if (match := _MODULE.search(path)) and (form := ExpertsForm.of(module)) is not None
    }
    places = {}
    for info in file.tensors:
        match = _NAME.fullmatch(info.name)
        if match is None or match["layer"] not in modules:
            continue
        path, module, form = modules[match["layer"]]
        suffix = "_bias" if match["kind"] == "bias" else ""
        part = match["part"]
        if part in ("gate", "up") and form.has_gate:
            width = module.down_proj.shape[1 if form.is_transposed else 2] if form.is_concatenated else None
            place = ExpertPlace(path, f"gate_up_proj{suffix}", part, _half(part, width), form.is_transposed)
        elif part == "gate_up" and not form.is_concatenated:
            # A file has all gates before all ups; the parameter has them in turn.
            continue
        else:
            place = ExpertPlace(path, f"{part}_proj{suffix}", "", slice(None), form.is_transposed)
        if hasattr(module, place.leaf):
            places[info.name] = place
    return places


def _half(part: str, width: int | None) -> slice:
    """The outputs of a merged gate-and-up parameter that belong to `part`.

    width: the outputs of gate and of up; None if they alternate.
    """
    if width is None:
        return slice(0 if part == "gate" else 1, None, 2)
    return slice(0, width) if part == "gate" else slice(width, None)


def require_expert_shape(module: Any, file: GGUFFile, place: ExpertPlace, info: TensorInfo) -> None:
    """Raise ModelError if an expert tensor's shape is not that of its part of the parameter."""
    experts, rows, columns = module.shapes[place.leaf]
    require_shape(file, info, (experts, len(range(rows)[place.outputs]), columns), info.shape)


def load_expert_tensor(
    model: nn.Module, file: GGUFFile, place: ExpertPlace, info: TensorInfo, data: np.ndarray, dtype: torch.dtype
) -> str | None:
    """Load an expert tensor into its place: quantized blocks if the module takes them, otherwise numbers.

    Returns the type to which the module converted the blocks; None if it did not convert any.

    Raises ModelError if the tensor's shape is not the parameter's.
    """
    module: Any = model.get_submodule(place.module)
    take = getattr(module, "load_experts", None)
    if take is not None and len(info.shape) == 3:
        require_expert_shape(module, file, place, info)
        blocks = np.ascontiguousarray(data.reshape(*info.shape[:2], -1)).view(np.uint8)
        kept: str | None = take(place.leaf, place.outputs, blocks, info.quantization, info.shape)
        return kept
    parameter = getattr(module, place.leaf)
    if parameter.is_meta:
        parameter = nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=False)
        set_parameter(module, place.leaf, parameter)
    numbers = parameter.data
    by_output = numbers.transpose(1, 2) if numbers.dim() == 3 and place.is_transposed else numbers
    room = by_output[:, place.outputs]
    require_shape(file, info, tuple(room.shape), info.shape)
    room.copy_(torch.from_numpy(np.array(numbers_of_blocks(data, info.quantization))))
    return None
