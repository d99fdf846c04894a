"""A parsed GGUF file, of which single parts can be changed."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np

STRING, ARRAY = 8, 9
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str | bytes) -> bytes:
    """A string as a header has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value) -> bytes:
    """A metadata value with its type; of numbers and strings."""
    return struct.pack("<I", kind) + (text(value) if kind == STRING else struct.pack("<" + FORMS[kind], value))


def array(kind: int, values) -> bytes:
    """A metadata array with its types."""
    items = b"".join(map(text, values)) if kind == STRING else struct.pack(f"<{len(values)}{FORMS[kind]}", *values)
    return struct.pack("<IIQ", ARRAY, kind, len(values)) + items


@dataclass
class Tensor:
    """What a header says of a tensor, in its order, and the tensor's bytes."""

    name: str
    dims: list[int]
    kind: int
    offset: int
    data: bytearray
    count: int | None = None

    def described(self) -> bytes:
        count = len(self.dims) if self.count is None else self.count
        dims = b"".join(struct.pack("<Q", length) for length in self.dims)
        return text(self.name) + struct.pack("<I", count) + dims + struct.pack("<IQ", self.kind, self.offset)


@dataclass
class Layout:
    """A file: metadata as (key, type and value), tensors, and what is said of both."""

    entries: list[tuple[str, bytes]]
    tensors: list[Tensor]
    counts: dict[str, int] = field(default_factory=dict)
    #: Written over the finished file's header: (place, byte); none where a later change has made that end before it.
    flips: list[tuple[int, int]] = field(default_factory=list)
    length: int | None = None

    @classmethod
    def of(cls, path: Path) -> Layout:
        """Taken apart by the gguf package."""
        reader = gguf.GGUFReader(path)
        entries = []
        for key, entry in reader.fields.items():
            if not key.startswith("GGUF."):
                # Behind the key's length and the key.
                entries.append((key, b"".join(part.tobytes() for part in entry.parts[2:])))
        first = min(tensor.data_offset for tensor in reader.tensors)
        tensors = [
            Tensor(
                tensor.name,
                [int(length) for length in tensor.shape],
                int(tensor.tensor_type),
                int(tensor.data_offset) - first,
                bytearray(np.ascontiguousarray(tensor.data).tobytes()),
            )
            for tensor in reader.tensors
        ]
        return cls(entries, tensors)

    def copy(self) -> Layout:
        """One that can be changed."""
        tensors = [replace(tensor, dims=[*tensor.dims], data=bytearray(tensor.data)) for tensor in self.tensors]
        return Layout([*self.entries], tensors, {**self.counts}, [*self.flips], self.length)

    def put(self, key: str, value: bytes | None) -> None:
        """Give a key a value with its type; None removes it."""
        self.entries = [entry for entry in self.entries if entry[0] != key]
        if value is not None:
            self.entries.append((key, value))

    def add(self, name: str, dims: list[int], data) -> None:
        """A further float32 tensor."""
        self.tensors.append(Tensor(name, dims, 0, 0, bytearray(np.asarray(data, np.float32).tobytes())))
        self.move_together()

    def numbers(self, name: str) -> np.ndarray:
        """The numbers of a float32 tensor, which can be changed."""
        tensor = next(each for each in self.tensors if each.name == name)
        return np.frombuffer(tensor.data, np.float32).reshape(tensor.dims[::-1])

    def move_together(self) -> None:
        """Put the tensors one behind the other."""
        place = 0
        for tensor in self.tensors:
            tensor.offset = place
            place += len(padded(bytes(tensor.data)))

    def header(self) -> bytes:
        """Everything before the data."""
        tensors, entries = (
            self.counts.get("tensors", len(self.tensors)),
            self.counts.get("entries", len(self.entries)),
        )
        parts = [b"GGUF", struct.pack("<IQQ", self.counts.get("version", 3), tensors, entries)]
        parts += [text(key) + value for key, value in self.entries]
        parts += [tensor.described() for tensor in self.tensors]
        return b"".join(parts)

    def write(self, path: Path) -> None:
        """The file, every tensor's bytes where an unchanged header has them."""
        header = self.header()
        content = bytearray(padded(header))
        for tensor in self.tensors:
            content += padded(bytes(tensor.data))
        for place, value in self.flips:
            if place < len(header):
                content[place] = value
        if self.length is not None:
            content = content[: self.length] + bytes(max(self.length - len(content), 0))
        path.write_bytes(content)


def padded(content: bytes, each: int = 32) -> bytes:
    """Filled up to whole pieces of `each` bytes."""
    return content + bytes(-len(content) % each)
