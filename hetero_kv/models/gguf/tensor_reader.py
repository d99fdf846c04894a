"""Reads the tensors of a GGUF file one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import BinaryIO

import gguf
import numpy as np

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.file import GGUFFile, TensorInfo
from hetero_kv.models.gguf.finite_check import all_finite
from hetero_kv.weights.block_numbers import numbers_of_blocks
from hetero_kv.weights.tensor_types import byte_shape

# numpy has no types for quantized blocks, which stay bytes.
_TYPES = gguf.GGMLQuantizationType
_PLAIN = {_TYPES.F16: np.float16, _TYPES.F32: np.float32, _TYPES.I32: np.int32}


def _data(file: GGUFFile, content: BinaryIO, info: TensorInfo) -> np.ndarray:
    """A tensor in the form that `gguf.dequantize` takes.

    It is read instead of mapped, because truncating a mapped file would kill the process.

    Raises ModelError if the file has become shorter, or the tensor has numbers that are not finite.
    """
    raw = np.empty(info.nbytes, np.uint8)
    content.seek(info.offset)
    room = memoryview(raw)  # type: ignore[arg-type]
    while room:
        count = content.readinto(room)  # type: ignore[attr-defined]
        if not count:
            raise file.changed()
        room = room[count:]
    if not all_finite(raw, info.quantization):
        raise ModelError(
            f"tensor {info.name!r} of {str(file.path)!r} has numbers that are not finite (NaN or infinite); "
            "download the file again, or convert it again"
        )
    if info.quantization in _PLAIN:
        return raw.view(_PLAIN[info.quantization]).reshape(info.shape)
    return raw.reshape(byte_shape(info.shape, info.quantization))


def tensor_data(file: GGUFFile, names: Collection[str] | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
    """Each tensor with its data in the form that `gguf.dequantize` takes, in the file's order.

    names: of the tensors to read; None for all.

    Raises ModelError if the file has changed since its header was read, or numbers are not finite.
    """
    for number, part in enumerate(file.parts):
        own = [info for info in file.tensors if info.part == number and (names is None or info.name in names)]
        with part.open() as content:
            for info in sorted(own, key=lambda info: info.offset):
                yield info, _data(part, content, info)


def numbers_of(file: GGUFFile, name: str) -> list[float] | None:
    """The numbers of a small tensor; None if the file lacks it."""
    for info in file.tensors:
        if info.name == name:
            part = file.parts[info.part]
            with part.open() as content:
                return [
                    float(number) for number in numbers_of_blocks(_data(part, content, info), info.quantization).flat
                ]
    return None
