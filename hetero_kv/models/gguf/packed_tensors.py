"""The tensors of a GGUF file that a model keeps packed as stored, and their way through the cache of packed weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from hetero_kv.cpu_ops.weight_blocks import pack
from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.models.gguf.experts import ExpertPlace, require_expert_shape
from hetero_kv.models.gguf.file import GGUFFile, TensorInfo
from hetero_kv.models.gguf.opening import note_packed
from hetero_kv.models.gguf.shapes import require_shape
from hetero_kv.models.gguf.tensor_reader import tensor_data
from hetero_kv.models.gguf.weights import WeightMap, owner_of, shape_of
from hetero_kv.models.packed_ahead import PACKED_AHEAD
from hetero_kv.models.packed_cache import PackedCache, discard
from hetero_kv.models.packed_file import DamagedPackedFileError, PackedFile
from hetero_kv.models.progress import ProgressReport
from hetero_kv.weights.quantized_weight import kernel_threads_of_torch


@dataclass(frozen=True)
class PackedTensor:
    """A tensor whose blocks a module keeps packed as stored.

    Attributes:
        info: the tensor.
        order: the tensor's row for each row of the parameter; None for the same order.
        take: gives the packed bytes to the module, [bytes] uint8.
    """

    info: TensorInfo
    order: np.ndarray | None
    take: Callable[[np.ndarray], None]

    @property
    def size(self) -> int:
        """Bytes of the packed tensor."""
        *matrices, rows, columns = self.info.shape
        return int(np.prod(matrices, dtype=np.int64)) * FORMATS[self.info.quantization.name].packed_bytes(rows, columns)

    @property
    def identity(self) -> str:
        """The settings that determine the packed bytes, in addition to the file and the code."""
        order = b"" if self.order is None else self.order.astype(np.int64).tobytes()
        kind = self.info.quantization.name
        return f"{self.info.name} {kind} {list(self.info.shape)} {hashlib.sha256(order).hexdigest()}"

    def packed(self, data: np.ndarray) -> Iterator[np.ndarray]:
        """The packed bytes of each matrix, uint8, of the tensor's data in its file."""
        for matrix in data.reshape(-1, *data.shape[-2:]):
            ordered = matrix if self.order is None else matrix[self.order]
            blocks = np.ascontiguousarray(ordered).view(np.uint8)
            yield pack(blocks, self.info.quantization.name, self.info.shape[-1], kernel_threads_of_torch())


def packed_tensors(model: nn.Module, file: GGUFFile, weights: WeightMap) -> list[PackedTensor]:
    """The tensors that single modules keep packed as stored; parts of a parameter are joined at every start.

    Raises ModelError if a tensor's shape is not its parameter's.
    """
    found = []
    for info in file.tensors:
        if info.name in weights.experts:
            found += _of_experts(model, file, weights.experts[info.name], info)
        elif info.name in weights.targets:
            found += _of_matrix(model, file, weights, info)
    return found


def _of_matrix(model: nn.Module, file: GGUFFile, weights: WeightMap, info: TensorInfo) -> list[PackedTensor]:
    target, name = weights.targets[info.name], info.quantization.name
    if target.part is not None or not weights.takes_blocks(model, info):
        return []
    module, leaf = owner_of(model, target.path)
    if not module.keeps_as_stored(name, info.shape[1]):
        return []
    require_shape(file, info, shape_of(module, leaf), info.shape)
    take = partial(module.load_packed, name=name, shape=info.shape, columns=weights.column_order(info))
    order = weights.row_order(info)
    is_same = order is None or bool((order == np.arange(info.shape[0])).all())
    return [PackedTensor(info, None if is_same else order, take)]


def _of_experts(model: nn.Module, file: GGUFFile, place: ExpertPlace, info: TensorInfo) -> list[PackedTensor]:
    module: Any = model.get_submodule(place.module)
    if (
        not hasattr(module, "load_experts")
        or len(info.shape) != 3
        or not module.keeps_as_stored(info.quantization.name, info.shape[2])
    ):
        return []
    require_expert_shape(module, file, place, info)
    take = partial(module.load_packed, place.leaf, place.outputs, name=info.quantization.name, shape=info.shape)
    return [PackedTensor(info, None, take)]


def load_from_cache(
    file: GGUFFile, tensors: Sequence[PackedTensor], cache: PackedCache, report: ProgressReport
) -> Path | None:
    """Load packed tensors from the cache, where they are put first if they are missing.

    Returns the folder of the cache that has them; None if that is impossible.


    Raises ModelError if the file has changed, or numbers are not finite.
    """
    size = sum(tensor.size for tensor in tensors)
    if not cache.is_for(file, size):
        return None
    identities = [tensor.identity for tensor in tensors]
    # A file that was damaged is packed once more.
    for _ in range(2):
        kept = cache.kept(file, identities, size, _packed(file, tensors, report))
        if kept is None:
            return None
        try:
            found = _found(kept, tensors, cache.maps(size), report)
        except (DamagedPackedFileError, OSError) as error:
            discard(kept.path, error)
            continue
        finally:
            kept.close()
        for tensor, data in zip(tensors, found, strict=True):
            tensor.take(data)
        note_packed(file, kept.path.parent)
        return kept.path.parent
    return None


def _packed(
    file: GGUFFile, tensors: Sequence[PackedTensor], report: ProgressReport
) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    by_name = {tensor.info.name: tensor for tensor in tensors}
    done, total = 0, sum(tensor.info.nbytes for tensor in tensors)
    for info, data in tensor_data(file, by_name):
        yield info.name, by_name[info.name].packed(data)
        done += info.nbytes
        report("packing weights", done, total)


def _found(kept: PackedFile, tensors: Sequence[PackedTensor], maps: bool, report: ProgressReport) -> list[np.ndarray]:
    """The packed bytes of each tensor, mapped or copied."""
    ahead = PACKED_AHEAD.take(None if maps else kept)
    try:
        return _read(tensors, kept.mapped if maps else (ahead or kept).copied, report)
    finally:
        if ahead is not None:
            ahead.close()


def _read(
    tensors: Sequence[PackedTensor], read: Callable[[str], np.ndarray], report: ProgressReport
) -> list[np.ndarray]:
    done, total = 0, sum(tensor.size for tensor in tensors)
    found = []
    with ThreadPoolExecutor(kernel_threads_of_torch()) as pool:
        for tensor, data in zip(tensors, pool.map(read, [each.info.name for each in tensors]), strict=True):
            found.append(data)
            done += tensor.size
            report("reading weights", done, total)
    return found
