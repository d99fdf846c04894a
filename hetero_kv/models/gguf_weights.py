"""The tensors of a GGUF file, put into a model that stands there without its weights.

Names and conversions are transformers' own (`modeling_gguf_pytorch_utils`). A module that has a method `load_blocks`
takes the file's quantised blocks as they are, where the conversion of its weight does no more than reorder rows;
everything else is unpacked to a parameter. Where transformers merges or splits tensors, the model is not put together
here.
"""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf_file import GGUFFile, TensorInfo
from hetero_kv.models.gguf_reading import tensor_data
from hetero_kv.models.progress import ProgressReport


class WeightMap:
    """Which parameter of a model each tensor of a GGUF file is, and what is done to it on the way.

    Attributes:
        targets: GGUF's name -> the parameter's.
    """

    def __init__(self, processor: Any, targets: dict[str, str]) -> None:
        self.processor, self.targets = processor, targets

    @classmethod
    def of(cls, model: Any, file: GGUFFile) -> WeightMap | None:
        """For a model as transformers builds it; None where tensors do not become parameters one by one."""
        try:
            processors, plain = transformers_gguf.TENSOR_PROCESSORS, transformers_gguf.TensorProcessor
            names = transformers_gguf.get_gguf_hf_weights_map
        except AttributeError:
            return None
        processor_class = processors.get(file.architecture, plain)
        merges = ("preprocess_name", "perform_fallback_tensor_mapping")
        if any(getattr(processor_class, name) is not getattr(plain, name) for name in merges):
            return None
        processor = processor_class(config=model.config.get_text_config().to_dict())
        targets = names(model, processor)
        if any(processor.process(_numbered(info), info.name).name != info.name for info in file.tensors):
            return None
        return cls(processor, {name: targets[name] for name in file.tensor_names & targets.keys()})

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
        """Parameter -> GGML's name of the type that a module may take its blocks in."""
        return {
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
    tied = _tied(model)
    done, total = 0, sum(info.nbytes for info in file.tensors)
    for info, data in tensor_data(file):
        if info.name in weights.targets:
            _load(model, weights, info, data, dtype)
        done += info.nbytes
        report("reading weights", done, total)
    for place, source in tied.items():
        _tie(model, place, source)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise ModelError(
            f"{str(file.path)!r} has no weights for {len(left)} parameters of {type(model).__name__} "
            f"({', '.join(left[:3])}, …); give weights that belong to the configuration"
        )


def _load(model: nn.Module, weights: WeightMap, info: TensorInfo, data: np.ndarray, dtype: torch.dtype) -> None:
    path, _, leaf = weights.targets[info.name].rpartition(".")
    module = model.get_submodule(path)
    load_blocks = getattr(module, "load_blocks", None)
    expected = _shape(module, leaf)
    if load_blocks is not None and leaf == "weight" and len(info.shape) == 2:
        order = weights.row_order(info)
        if order is not None:
            _require_shape(info, expected, info.shape)
            rows = data.reshape(info.shape[0], -1)
            identity = (order == np.arange(len(order))).all()
            blocks = rows if identity else rows[order]
            load_blocks(np.ascontiguousarray(blocks).view(np.uint8), info.quantization, info.shape)
            return
    numbers = weights.numbers(info, data)
    _require_shape(info, expected, numbers.shape)
    # A copy: the file is mapped and may go.
    tensor = torch.from_numpy(np.array(numbers)).to(dtype)
    _set_parameter(module, leaf, nn.Parameter(tensor, requires_grad=False))


def _shape(module: Any, leaf: str) -> tuple[int, ...]:
    return tuple(getattr(module, leaf).shape)


def _require_shape(info: TensorInfo, expected: tuple[int, ...], given: tuple[int, ...]) -> None:
    if tuple(given) != expected:
        raise ModelError(
            f"tensor {info.name!r} is {list(given)} and the model has {list(expected)} there; give weights that belong "
            "to the configuration"
        )


def _tied(model: Any) -> dict[str, str]:
    """Parameters that are another one by the configuration: path -> the path of the one that a file holds."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = name.replace(".wrapped.", ".")
        if id(parameter) in first and first[id(parameter)] != plain:
            tied[plain] = first[id(parameter)]
        first.setdefault(id(parameter), plain)
    return tied


def _tie(model: nn.Module, place: str, source: str) -> None:
    (path, _, leaf), (source_path, _, source_leaf) = place.rpartition("."), source.rpartition(".")
    module, other = model.get_submodule(path), model.get_submodule(source_path)
    share = getattr(module, "share", None)
    if share is not None and hasattr(other, "load_blocks") and share(other):
        return
    numbers = getattr(other, source_leaf)
    parameter = numbers if isinstance(numbers, nn.Parameter) else nn.Parameter(numbers, requires_grad=False)
    _set_parameter(module, leaf, parameter)


def _set_parameter(module: Any, leaf: str, parameter: nn.Parameter) -> None:
    """Exchange a parameter of a module, or of the one that it stands for."""
    while leaf not in module._parameters:
        module = module.wrapped
    module._parameters[leaf] = parameter
