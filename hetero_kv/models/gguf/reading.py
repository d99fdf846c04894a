"""One reading of a GGUF file for everything transformers asks of it.

transformers builds the configuration, the tokenizer and the weights each from a reading of its own, through
`gguf.GGUFReader`, which makes an array object of every token and merge, and it builds the map of tensor names anew for
every module of the model: three quarters of the time to load a small model. Inside `one_reading` it gets this package's
header and one map instead, and the tensors pass with a progress report.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import gguf
import numpy as np
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.file import GGUFFile, TensorInfo
from hetero_kv.models.gguf.header import ARRAY, MetadataValue
from hetero_kv.models.gguf.numbers import all_finite
from hetero_kv.models.progress import ProgressReport

# What is exchanged below belongs to the whole process.
_one_at_a_time = threading.RLock()

# numpy has no name for the element types that quantized blocks are made of: those stay bytes.
_PLAIN = {gguf.GGMLQuantizationType.F16: np.float16, gguf.GGMLQuantizationType.F32: np.float32}

VOCABULARY = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))
# As many as a model has layers, at least.
FEW_ELEMENTS = 4096


class _Field(NamedTuple):
    """A metadata entry as `gguf.ReaderField` gives it to transformers: the values are `parts[i] for i in data`."""

    parts: list[Any]
    data: range
    types: list[gguf.GGUFValueType]


@dataclass(frozen=True)
class _Tensor:
    """A tensor as `gguf.ReaderTensor` gives it to transformers."""

    file: GGUFFile
    info: TensorInfo

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def tensor_type(self) -> gguf.GGMLQuantizationType:
        return self.info.quantization

    @property
    def n_bytes(self) -> int:
        return self.info.nbytes

    @property
    def data(self) -> np.ndarray:
        """Read anew at every use, for it is used once."""
        with self.file.open() as content:
            return _data(self.file, content, self.info)


class _Reader:
    """What transformers uses of `gguf.GGUFReader`, over a header that is read already."""

    def __init__(self, file: GGUFFile) -> None:
        self.fields = {
            key: _field(entry.types, entry.value) for key, entry in file.metadata.items() if _is_read(key, entry)
        }
        self.tensors = [_Tensor(file, info) for info in file.tensors]


def _is_read(key: str, entry: MetadataValue) -> bool:
    """Whether transformers has use for an entry: it takes every number apart, and those of a vocabulary are many."""
    return entry.types[0] != ARRAY or len(entry.value) <= FEW_ELEMENTS or key in VOCABULARY


def _field(types: tuple[int, ...], value: Any) -> _Field:
    values = list(value) if types[0] == ARRAY else [value]
    parts = values if values and isinstance(values[0], bytes) else [(item,) for item in values]
    return _Field(parts, range(len(parts)), [gguf.GGUFValueType(kind) for kind in types])


def _data(file: GGUFFile, content: BinaryIO, info: TensorInfo) -> np.ndarray:
    """A tensor as `gguf.dequantize` takes it, read and not mapped: a mapped file that is cut short ends the process.

    Raises ModelError where the file has become shorter, or the tensor has numbers that are not finite.
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
    return raw.reshape(gguf.quant_shape_to_byte_shape(info.shape, info.quantization))


def tensor_data(file: GGUFFile) -> Iterator[tuple[TensorInfo, np.ndarray]]:
    """Each tensor with its data as `gguf.dequantize` takes it, in the file's order.

    Raises ModelError where the file has changed since its header was read, or numbers are not finite.
    """
    with file.open() as content:
        for info in sorted(file.tensors, key=lambda info: info.offset):
            yield info, _data(file, content, info)


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
