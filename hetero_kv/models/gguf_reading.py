"""One reading of a GGUF file for everything transformers asks of it.

transformers builds the configuration, the tokenizer and the weights each from a reading of its own, through
`gguf.GGUFReader`, which makes an array object of every token and merge, and it builds the map of tensor names anew for
every module of the model: three quarters of the time to load a small model. Inside `one_reading` it gets this package's
header and one map instead, and the tensors pass with a progress report.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import gguf
import numpy as np
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from hetero_kv.models.gguf_file import ARRAY, GGUFFile, TensorInfo
from hetero_kv.models.progress import ProgressReport

# What is exchanged below belongs to the whole process.
_one_at_a_time = threading.RLock()

# numpy has no name for the element types that quantized blocks are made of: those stay bytes.
_PLAIN = {
    gguf.GGMLQuantizationType.F16: np.float16,
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F64: np.float64,
    gguf.GGMLQuantizationType.I8: np.int8,
    gguf.GGMLQuantizationType.I16: np.int16,
    gguf.GGMLQuantizationType.I32: np.int32,
    gguf.GGMLQuantizationType.I64: np.int64,
}


class _Field(NamedTuple):
    """A metadata entry as `gguf.ReaderField` gives it to transformers: the values are `parts[i] for i in data`."""

    parts: list[Any]
    data: range
    types: list[gguf.GGUFValueType]


class _Tensor(NamedTuple):
    """A tensor as `gguf.ReaderTensor` gives it to transformers."""

    name: str
    tensor_type: gguf.GGMLQuantizationType
    data: np.ndarray
    n_bytes: int


class _Reader:
    """What transformers uses of `gguf.GGUFReader`, over a header that is read already."""

    def __init__(self, file: GGUFFile) -> None:
        self.fields = {key: _field(entry.types, entry.value) for key, entry in file.metadata.items()}
        blob = np.asarray(np.memmap(file.path, mode="r"))
        self.tensors = [_tensor(blob, info) for info in file.tensors]


def _field(types: tuple[int, ...], value: Any) -> _Field:
    values = list(value) if types[0] == ARRAY else [value]
    parts = values if values and isinstance(values[0], bytes) else [(item,) for item in values]
    return _Field(parts, range(len(parts)), [gguf.GGUFValueType(kind) for kind in types])


def _tensor(blob: np.ndarray, info: TensorInfo) -> _Tensor:
    raw = blob[info.offset : info.offset + info.nbytes]
    if info.quantization in _PLAIN:
        data = raw.view(_PLAIN[info.quantization]).reshape(info.shape)
    else:
        data = raw.reshape(gguf.quant_shape_to_byte_shape(info.shape, info.quantization))
    return _Tensor(info.name, info.quantization, data, info.nbytes)


def tensor_data(file: GGUFFile) -> Iterator[tuple[TensorInfo, np.ndarray]]:
    """Each tensor with its data as `gguf.dequantize` takes it, a view of the mapped file, in the file's order.

    The memory behind a view is given back when the next tensor comes: a file is never in memory beside what is made of
    it. A view that is read again later is read from the file again.
    """
    with file.path.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    blob = np.frombuffer(mapped, np.uint8)
    for info in sorted(file.tensors, key=lambda info: info.offset):
        yield info, _tensor(blob, info).data
        if hasattr(mmap, "MADV_DONTNEED"):
            start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)


@contextmanager
def one_reading(file: GGUFFile, report: ProgressReport) -> Iterator[None]:
    """While this lasts, transformers reads `file` from the header given here and reports the bytes it has unpacked."""
    reader = _Reader(file)

    def reader_of(path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        return reader if os.path.samefile(path, file.path) else original_reader(path, *args, **kwargs)

    def reported(tensors: Iterable[_Tensor], *args: Any, **kwargs: Any) -> Iterator[_Tensor]:
        done, total = 0, sum(tensor.n_bytes for tensor in reader.tensors)
        for tensor in tensors:
            yield tensor
            done += tensor.n_bytes
            report("unpacking weights", done, total)

    original_reader: Callable[..., Any] = gguf.GGUFReader
    exchanged = (
        (gguf, "GGUFReader", reader_of),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        (transformers_gguf, "tqdm", reported),
    )
    with _one_at_a_time, ExitStack() as stack:
        for module, name, replacement in exchanged:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, replacement)
        yield
