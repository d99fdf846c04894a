"""The header of a GGUF file: its metadata and where each tensor lies, without reading the tensors.

The layout (little-endian) is that of the GGUF specification, versions 2 and 3:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
A vocabulary is hundreds of thousands of strings, so the header is walked with `struct` over one memory map: well under
a second, where an array object per string takes many. A file that is cut short or damaged is refused here, by name.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from hetero_kv.models.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# The value types of fixed size, by their number in the specification, as `struct` letters.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class MetadataValue:
    """One metadata entry: `types` is (type,) or (ARRAY, element type); strings are left as UTF-8 bytes."""

    types: tuple[int, ...]
    value: Any


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `shape` in torch's order (slowest dimension first), `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """The header of the GGUF file at `path`."""

    path: Path
    metadata: dict[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]

    @classmethod
    def read(cls, path: Path) -> GGUFFile:
        """Read the header of `path`.

        Raises:
            ModelError: no such file, not a GGUF file, a version or byte order that is not supported, one part of a
                split model, or a file that is damaged or shorter than its header says.
        """
        if not path.is_file():
            raise ModelError(f"there is no GGUF file {str(path)!r}; check the path")
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{str(path)!r} does not begin with the letters GGUF; give a file in GGUF format")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
                try:
                    return _Cursor(blob, len(MAGIC)).header(path, size)
                except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError, KeyError) as error:
                    if isinstance(error, ModelError):
                        raise
                    raise ModelError(
                        f"the header of {str(path)!r} ({size:,} bytes) is damaged or cut short; download the file again"
                    ) from error

    @property
    def architecture(self) -> str:
        """The kind of model, in the file's own spelling (`qwen2`, `llama`)."""
        return str(self.get("general.architecture"))

    @property
    def tensor_names(self) -> frozenset[str]:
        """The names of the tensors, as GGUF spells them (`output.weight`)."""
        return frozenset(tensor.name for tensor in self.tensors)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value `key`, strings decoded, or `default` where the file does not have it."""
        entry = self.metadata.get(key)
        if entry is None:
            return default
        if entry.types == (STRING,):
            return entry.value.decode()
        if entry.types == (ARRAY, STRING):
            return [text.decode() for text in entry.value]
        return entry.value


class _Cursor:
    """A position in the header that moves on as values are read."""

    def __init__(self, blob: mmap.mmap, position: int) -> None:
        self.blob, self.position = blob, position

    def header(self, path: Path, size: int) -> GGUFFile:
        (version,) = self.unpack("<I")
        if version & 0xFFFF == 0:
            raise ModelError(f"{str(path)!r} was written for big-endian machines; convert it to little-endian GGUF")
        if version not in VERSIONS:
            raise ModelError(
                f"{str(path)!r} is GGUF version {version}; versions 2 and 3 are supported: convert it again"
            )
        tensor_count, entry_count = self.unpack("<QQ")
        metadata = {}
        for _ in range(entry_count):
            key = self.string().decode()
            metadata[key] = self.metadata_value()
        if "general.architecture" not in metadata:
            raise ModelError(f"{str(path)!r} has no general.architecture in its metadata; convert it again")
        parts = metadata.get("split.count")
        if parts is not None and parts.value > 1:
            raise ModelError(
                f"{str(path)!r} is one of {parts.value} parts of a split model; "
                "merge them into one file first (llama.cpp: llama-gguf-split --merge)"
            )
        entries = [self.tensor_entry() for _ in range(tensor_count)]
        alignment = metadata["general.alignment"].value if "general.alignment" in metadata else DEFAULT_ALIGNMENT
        start = math.ceil(self.position / alignment) * alignment
        tensors = tuple(self.located(start, *entry) for entry in entries)
        end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=start)
        if end > size:
            raise ModelError(
                f"{str(path)!r} is cut short: its tensors end at byte {end:,} and it has {size:,}; "
                "download the file again"
            )
        return GGUFFile(path, metadata, tensors)

    def metadata_value(self) -> MetadataValue:
        (kind,) = self.unpack("<I")
        if kind == STRING:
            return MetadataValue((kind,), self.string())
        if kind != ARRAY:
            return MetadataValue((kind,), self.unpack("<" + SCALARS[kind])[0])
        element, count = self.unpack("<IQ")
        if element == STRING:
            return MetadataValue((kind, element), [self.string() for _ in range(count)])
        return MetadataValue((kind, element), self.unpack(f"<{count}{SCALARS[element]}"))

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string().decode()
        (dimensions,) = self.unpack("<I")
        fastest_first = self.unpack(f"<{dimensions}Q")
        kind, offset = self.unpack("<IQ")
        return name, fastest_first[::-1], kind, offset

    def located(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        quantization = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        return TensorInfo(name, shape, quantization, start + offset, math.prod(shape) // block * block_bytes)

    def unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self.blob, self.position)
        self.position += struct.calcsize(form)
        return values

    def string(self) -> bytes:
        (length,) = struct.unpack_from("<Q", self.blob, self.position)
        begin = self.position + 8
        self.position = begin + length
        if self.position > len(self.blob):
            raise ValueError("a string reaches past the end of the file")
        return self.blob[begin : self.position]
