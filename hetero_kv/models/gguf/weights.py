"""The tensors of a GGUF file, put into a model that stands there without its weights.

Names and conversions are transformers' own (`modeling_gguf_pytorch_utils`), but for a mixture's experts
(`models/gguf/experts.py`). A module that has a method `load_blocks` or `load_experts` takes the file's quantised blocks
as they are, where the conversion of its weight does no more than reorder rows; everything else is unpacked to a
parameter. Where transformers merges or splits other tensors, the model is not put together here.
"""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from hetero_kv.models.gguf.experts import (
    ExpertPlace,
    expert_places,
    load_expert_tensor,
    require_shape,
)
from hetero_kv.models.gguf.file import GGUFFile, TensorInfo
from hetero_kv.models.gguf.reading import tensor_data
from hetero_kv.models.parameters import require_all_loaded, set_parameter, tie, tied_parameters
from hetero_kv.models.progress import ProgressReport


class WeightMap:
    """Which parameter of a model each tensor of a GGUF file is, and what is done to it on the way.

    Attributes:
        targets: GGUF's name -> the parameter's.
        experts: GGUF's name -> the place of a tensor of experts in a parameter.
    """

    def __init__(self, processor: Any, targets: dict[str, str], experts: dict[str, ExpertPlace]) -> None:
        self.processor, self.targets, self.experts = processor, targets, experts

    @classmethod
    def of(cls, model: Any, file: GGUFFile) -> WeightMap | None:
        """For a model as transformers builds it; None where tensors do not become parameters one by one."""
        try:
            processors, plain = transformers_gguf.TENSOR_PROCESSORS, transformers_gguf.TensorProcessor
            names = transformers_gguf.get_gguf_hf_weights_map
        except AttributeError:
            return None
        processor = processors.get(file.architecture, plain)(config=model.config.get_text_config().to_dict())
        try:
            targets = names(model, processor)
        except NotImplementedError:
            # A model that GGUF has under another's name, as Mixtral under Llama's.
            targets = names(model, processor, model_type=file.architecture)
        experts = expert_places(model, file)
        single = [info for info in file.tensors if info.name not in experts]
        if any(processor.process(_numbered(info), info.name).name != info.name for info in single):
            return None
        # Of a parameter that is no module's `weight` the file's tensor is called so all the same.
        found = {info.name: targets.get(info.name) or targets.get(info.name.removesuffix(".weight")) for info in single}
        mapped = {name: target for name, target in found.items() if target is not None}
        if len(set(mapped.values())) < len(mapped) or not set(mapped.values()) <= model.state_dict().keys():
            return None
        return cls(processor, mapped, experts)

    def row_order(self, info: TensorInfo) -> np.ndarray | None:
        """The order in which the tensor's rows are a parameter's; None where the conversion does something else."""
        rows, numbered = info.shape[0], _numbered(info)
        converted = self.processor.process(numbered, info.name).weights
        # Rows begin with odd numbers: one that was added to has an even one.
        if converted.shape != numbered.shape or (converted[:, 1] - converted[:, 0] != 1).any():
            return None
        if (converted[:, 0] % 2 != 1).any():
            return None
        order = converted[:, 0] // 2
        return order.astype(np.int64) if (np.sort(order) == np.arange(rows)).all() else None

    def stored_types(self, file: GGUFFile) -> dict[str, str]:
        """Parameter -> GGML's name of the type that a module may take its blocks in.

        Where gate and up projections of experts are one parameter, it is named with ".gate" and with ".up" behind.
        """
        experts = {
            place.parameter + (f".{place.part}" if place.part else ""): info.quantization.name
            for info in file.tensors
            if (place := self.experts.get(info.name)) is not None and len(info.shape) == 3
        }
        return experts | {
            self.targets[info.name]: info.quantization.name
            for info in file.tensors
            if info.name in self.targets and len(info.shape) == 2 and self.row_order(info) is not None
        }

    def numbers(self, info: TensorInfo, data: np.ndarray) -> np.ndarray:
        """The tensor as the parameter's numbers."""
        return self.processor.process(gguf.dequantize(data, info.quantization), info.name).weights


def _numbered(info: TensorInfo) -> np.ndarray:
    """A tensor's likeness, two columns wide, its numbers counted through."""
    shape = info.shape if len(info.shape) == 1 else (*info.shape[:-1], 2)
    return np.arange(1, 1 + math.prod(shape), dtype=np.float64).reshape(shape)


def load_weights(model: Any, file: GGUFFile, weights: WeightMap, dtype: torch.dtype, report: ProgressReport) -> None:
    """Put the tensors of `file` into `model`, whose parameters are on the meta device.

    Args:
        dtype: of parameters that are numbers.
        report: called with "reading weights", the bytes done and the bytes in all.

    Raises ModelError where parameters are left without weights, or a tensor has another shape than its parameter.
    """
    tied = tied_parameters(model)
    done, total = 0, sum(info.nbytes for info in file.tensors)
    for info, data in tensor_data(file):
        if info.name in weights.experts:
            load_expert_tensor(model, weights.experts[info.name], info, data, dtype)
        elif info.name in weights.targets:
            _load(model, weights, info, data, dtype)
        done += info.nbytes
        report("reading weights", done, total)
    for place, source in tied.items():
        tie(model, place, source)
    require_all_loaded(model, file.path)


def _load(model: nn.Module, weights: WeightMap, info: TensorInfo, data: np.ndarray, dtype: torch.dtype) -> None:
    path, _, leaf = weights.targets[info.name].rpartition(".")
    module = model.get_submodule(path)
    load_blocks = getattr(module, "load_blocks", None)
    expected = _shape(module, leaf)
    if load_blocks is not None and leaf == "weight" and len(info.shape) == 2:
        order = weights.row_order(info)
        if order is not None:
            require_shape(info, expected, info.shape)
            rows = data.reshape(info.shape[0], -1)
            identity = (order == np.arange(len(order))).all()
            blocks = rows if identity else rows[order]
            load_blocks(np.ascontiguousarray(blocks).view(np.uint8), info.quantization, info.shape)
            return
    numbers = weights.numbers(info, data)
    require_shape(info, expected, numbers.shape)
    # A copy: the file is mapped and may go.
    tensor = torch.from_numpy(np.array(numbers)).to(dtype)
    set_parameter(module, leaf, nn.Parameter(tensor, requires_grad=False))


def _shape(module: Any, leaf: str) -> tuple[int, ...]:
    return tuple(getattr(module, leaf).shape)
