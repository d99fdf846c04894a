"""Loads the tensors of a GGUF file into a model that is built without weights.

`WeightMap` says where each belongs. A module with a method `load_blocks` or `load_experts` takes the file's quantized
blocks unchanged, if the transform only reorders rows and columns. All other tensors are unpacked to numbers.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.experts import load_expert_tensor
from hetero_kv.models.gguf.file import GGUFFile, TensorInfo
from hetero_kv.models.gguf.opening import note_packed
from hetero_kv.models.gguf.packed_tensors import load_from_cache, packed_tensors
from hetero_kv.models.gguf.row_parts import joined
from hetero_kv.models.gguf.shapes import require_shape
from hetero_kv.models.gguf.tensor_reader import tensor_data
from hetero_kv.models.gguf.weights import ROW, WeightMap, owner_of, shape_of
from hetero_kv.models.packed_ahead import PACKED_AHEAD
from hetero_kv.models.packed_cache import PackedCache
from hetero_kv.models.parameters import parameter_dtype, set_tensor, tie, tied_parameters
from hetero_kv.models.progress import ProgressReport

_logger = logging.getLogger(__name__)


def load_weights(
    model: Any,
    file: GGUFFile,
    weights: WeightMap,
    dtype: torch.dtype,
    report: ProgressReport,
    cache: PackedCache | None = None,
) -> None:
    """Load the tensors of `file` into `model`, whose parameters are on the meta device.

    Args:
        dtype: the dtype of unquantized parameters.
        report: called with an activity, the bytes done and the total bytes.
        cache: where packed weights are kept for later starts; None for nowhere.

    Raises ModelError if a tensor's shape is not its parameter's.
    """
    tied = tied_parameters(model)
    packed = [] if cache is None else packed_tensors(model, file, weights)
    loaded: set[str] = set()
    folder = None if cache is None else load_from_cache(file, packed, cache, report)
    if cache is not None and folder is not None:
        # By what is known of these weights.
        model.hetero_kv_packed_folder = folder
        loaded = {each.info.name for each in packed}
        # For the memory plan: the system may drop their pages, and a token needs them.
        size = sum(each.size for each in packed)
        model.hetero_kv_mapped_weights = size if cache.maps(size) else 0
    else:
        PACKED_AHEAD.take(None)
        note_packed(file, None)
    left = {info.name: info.nbytes for info in file.tensors if info.name not in loaded}
    done, total = 0, sum(left.values())
    converted: Counter[tuple[str, str]] = Counter()
    parts: dict[str, list[tuple[TensorInfo, np.ndarray]]] = {}
    for info, data in tensor_data(file, left):
        kept = None
        if info.name in weights.experts:
            kept = load_expert_tensor(model, file, weights.experts[info.name], info, data, dtype)
        elif info.name in weights.targets:
            load = _load if weights.targets[info.name].part is None else partial(_load_part, parts)
            kept = load(model, file, weights, info, data, dtype)
        if kept is not None:
            converted[info.quantization.name, kept] += 1
        done += info.nbytes
        report("reading weights", done, total)
    for path, number in weights.scalars.items():
        module, leaf = owner_of(model, path)
        known = getattr(module, leaf)
        own = parameter_dtype(model, path, dtype) if known.is_floating_point() else known.dtype
        set_tensor(module, leaf, torch.tensor(number, dtype=own).expand(known.shape).clone())
    for place, source in tied.items():
        tie(model, place, source)
    if converted:
        counts = (f"{count} of {stored} to {kept}" for (stored, kept), count in sorted(converted.items()))
        _logger.warning("%s: tensors of types without kernels are converted: %s", file.path, ", ".join(counts))


def _load(
    model: nn.Module, file: GGUFFile, weights: WeightMap, info: TensorInfo, data: np.ndarray, dtype: torch.dtype
) -> str | None:
    target = weights.targets[info.name]
    paths = target.paths(info)
    module, leaf = owner_of(model, paths[0])
    if weights.takes_blocks(model, info):
        require_shape(file, info, shape_of(module, leaf), info.shape)
        blocks, columns = _blocks(weights, info, data), weights.column_order(info)
        kept: str | None = module.load_blocks(blocks, info.quantization, info.shape, columns)
        return kept
    numbers = _numbers(weights, file, info, data)
    for path, part in zip(paths, numbers if ROW in target.path else (numbers,), strict=True):
        module, leaf = owner_of(model, path)
        require_shape(file, info, shape_of(module, leaf), part.shape)
        buffer = module._buffers.get(leaf)
        if buffer is not None and not buffer.is_floating_point():
            set_tensor(module, leaf, _experts_by_token(file, info, part, module))
            continue
        # A copy: the numbers may be a view of the file's bytes.
        set_tensor(module, leaf, torch.from_numpy(np.array(part)).to(parameter_dtype(model, path, dtype)))
    return None


def _experts_by_token(file: GGUFFile, info: TensorInfo, numbers: np.ndarray, router: Any) -> torch.Tensor:
    """A table of each token's experts. Raises ModelError if it is not of whole numbers, or names an expert too many."""
    most = int(router.num_experts)
    if not np.issubdtype(numbers.dtype, np.integer) or numbers.min() < 0 or numbers.max() >= most:
        raise ModelError(
            f"tensor {info.name!r} of {str(file.parts[info.part].path)!r} has other numbers than those of {most} "
            "experts; download the file again, or convert it again"
        )
    return torch.from_numpy(numbers.astype(np.int64))


def _load_part(
    parts: dict[str, list[tuple[TensorInfo, np.ndarray]]],
    model: nn.Module,
    file: GGUFFile,
    weights: WeightMap,
    info: TensorInfo,
    data: np.ndarray,
    dtype: torch.dtype,
) -> str | None:
    """Load a parameter when the last of its parts is read; `parts` has those that are read, by the parameter's path."""
    path = weights.targets[info.name].path
    module, leaf = owner_of(model, path)
    shape = shape_of(module, leaf)
    found = parts.setdefault(path, [])
    found.append((info, data))
    rows = [weights.part_rows(each) for each, _ in found]
    if sum(map(len, rows)) < shape[0]:
        return None
    del parts[path]
    load_blocks = getattr(module, "load_blocks", None)
    same_blocks = all(weights.keeps_blocks(each) and each.quantization == info.quantization for each, _ in found)
    if load_blocks is not None and leaf == "weight" and same_blocks:
        shapes, data_of_parts = [each.shape for each, _ in found], [_blocks(weights, *each) for each in found]
    else:
        data_of_parts = [_numbers(weights, file, *each) for each in found]
        shapes = [each.shape for each in data_of_parts]
    for (each, _), places, found_shape in zip(found, rows, shapes, strict=True):
        require_shape(file, each, (len(places), *shape[1:]), found_shape)
    whole = joined(rows, data_of_parts)
    if load_blocks is not None and leaf == "weight" and same_blocks:
        kept: str | None = load_blocks(whole, info.quantization, shape)
        return kept
    set_tensor(module, leaf, torch.from_numpy(whole).to(parameter_dtype(model, path, dtype)))
    return None


def _numbers(weights: WeightMap, file: GGUFFile, info: TensorInfo, data: np.ndarray) -> np.ndarray:
    """The tensor as numbers of the parameter. Raises ModelError if these are not finite, though the tensor's are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = weights.numbers(info, data)
    target = weights.targets[info.name]
    if target.transform is not None and not target.transform.keeps_blocks and not np.isfinite(numbers).all():
        raise ModelError(
            f"tensor {info.name!r} of {str(file.parts[info.part].path)!r} has numbers from which {target.path} cannot "
            "be made (a logarithm of 0 or less); download the file again, or convert it again"
        )
    return numbers


def _blocks(weights: WeightMap, info: TensorInfo, data: np.ndarray) -> np.ndarray:
    """The bytes of a tensor's blocks, in the order of the parameter's or part's rows."""
    order, rows = weights.row_order(info), data.reshape(info.shape[0], -1)
    blocks = rows if order is None or (order == np.arange(len(rows))).all() else rows[order]
    return np.ascontiguousarray(blocks).view(np.uint8)
