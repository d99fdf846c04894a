"""Parses the parts of a GGUF header from bytes, within limits.

The layout (little-endian) is that of the GGUF specification, versions 2 and 3:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
Counts and lengths are compared with the remaining bytes before anything is allocated. A vocabulary has hundreds of
thousands of strings, so they are sliced from one buffer in well under a second; an array object per string takes many.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from hetero_kv.weights.tensor_types import TensorType, tensor_type

STRING, ARRAY, BOOL = 8, 9, 7
# The value types of fixed size, by their number in the specification, as `struct` letters.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
FLOATS = frozenset({6, 12})

# Limits: many times the sizes of the largest models, and small enough to read in seconds.
HEADER_BYTES = 64 << 20
MOST_ENTRIES = 4096
MOST_TENSORS = 1 << 16
MOST_ELEMENTS = 1 << 20
MOST_ELEMENTS_IN_ALL = 1 << 22
LONGEST_STRING = 1 << 20
LONGEST_KEY = 256
#: Limit on a tensor's name, by the specification.
LONGEST_NAME = 64
MOST_DIMENSIONS = 4
#: Limit on the number of a tensor type; GGML has about 40.
LARGEST_TYPE = 127
_LENGTH = struct.Struct("<Q")
#: Of the keys that describe a file, those whose text matters; others may be in any encoding.
_DESCRIPTION, _READ = "general.", ("general.architecture", "general.type")


class MalformedHeaderError(ValueError):
    """A header that contradicts itself or exceeds a limit; the message continues a sentence about the file."""


class UnknownTypeError(MalformedHeaderError):
    """A tensor of a type that this version cannot read; the file may be sound."""


class PartOfModelError(MalformedHeaderError):
    """A sound file of another part of a model than the one that computes; the message says which."""


@dataclass(frozen=True)
class MetadataValue:
    """One metadata entry: `types` is (type,) or (ARRAY, element type); strings are left as UTF-8 bytes."""

    types: tuple[int, ...]
    value: Any


@dataclass(frozen=True)
class GGUFTensorEntry:
    """A tensor's entry in the header: `shape` slowest dimension first, `offset` from the start of the data."""

    name: str
    shape: tuple[int, ...]
    quantization: TensorType
    offset: int


class HeaderCursor:
    """A read position in a header. The parts are read in the order of the methods.

    Args:
        content: the file's beginning, up to HEADER_BYTES.
        position: the first position, bytes.

    Methods raise MalformedHeaderError for invalid content, and struct.error if the content ends early.
    """

    def __init__(self, content: bytes, position: int) -> None:
        self.content, self.position, self.elements = content, position, 0

    def unpack(self, form: str) -> tuple[Any, ...]:
        """The next values, in the notation of `struct`."""
        values = struct.unpack_from(form, self.content, self.position)
        self.position += struct.calcsize(form)
        return values

    def counts(self) -> tuple[int, int]:
        """The numbers of tensors and of metadata entries that follow."""
        tensors, entries = self.unpack("<QQ")
        if tensors > MOST_TENSORS or entries > MOST_ENTRIES:
            raise MalformedHeaderError(
                f"its header counts {tensors:,} tensors and {entries:,} metadata entries; the limits are "
                f"{MOST_TENSORS:,} and {MOST_ENTRIES:,}"
            )
        return tensors, entries

    def metadata(self, count: int) -> dict[str, MetadataValue]:
        """The metadata, `count` entries."""
        found: dict[str, MetadataValue] = {}
        for _ in range(count):
            key = self.name("a key", LONGEST_KEY)
            if key in found:
                raise MalformedHeaderError(f"it has the key {key!r} twice")
            found[key] = self._value(key)
        return found

    def tensors(self, count: int) -> tuple[GGUFTensorEntry, ...]:
        """The entries of `count` tensors."""
        found: dict[str, GGUFTensorEntry] = {}
        for _ in range(count):
            entry = self._tensor()
            if entry.name in found:
                raise MalformedHeaderError(f"it has the tensor {entry.name!r} twice")
            found[entry.name] = entry
        return tuple(found.values())

    def name(self, what: str, longest: int) -> str:
        """A printable string of 1 to `longest` bytes."""
        text = self._text(longest, "for a name", what).decode()
        if not text or not text.isprintable():
            raise MalformedHeaderError(f"{what} is {text!r}; a name has printable characters")
        return text

    def _value(self, key: str) -> MetadataValue:
        (kind,) = self.unpack("<I")
        if kind == STRING:
            return MetadataValue((kind,), self._text(LONGEST_STRING, f"in {key}", key))
        if kind != ARRAY:
            return MetadataValue((kind,), self._scalars(key, kind, 1)[0])
        element, count = self.unpack("<IQ")
        self.elements += count
        if count > MOST_ELEMENTS or self.elements > MOST_ELEMENTS_IN_ALL:
            raise MalformedHeaderError(
                f"{key} has {count:,} elements; the limit is {MOST_ELEMENTS:,}, and {MOST_ELEMENTS_IN_ALL:,} in all "
                "arrays together"
            )
        if element == STRING:
            return MetadataValue((kind, element), self._strings(key, count))
        return MetadataValue((kind, element), self._scalars(key, element, count))

    def _scalars(self, key: str, kind: int, count: int) -> tuple[Any, ...]:
        if kind not in SCALARS:
            raise MalformedHeaderError(f"{key} is of type {kind}; numbers, strings and arrays of these are known")
        values = self.unpack(f"<{count}{SCALARS[kind]}")
        if kind != BOOL:
            return values
        if any(value > 1 for value in values):
            raise MalformedHeaderError(f"{key} is neither true nor false")
        return tuple(map(bool, values))

    def _strings(self, key: str, count: int) -> list[bytes]:
        # No function call per string: a vocabulary has hundreds of thousands.
        content, position, end, length_at = self.content, self.position, len(self.content), _LENGTH.unpack_from
        texts = []
        for _ in range(count):
            (length,) = length_at(content, position)
            begin, position = position + 8, position + 8 + length
            if length > LONGEST_STRING or position > end:
                raise self._too_long(length, begin, LONGEST_STRING, f"in {key}")
            texts.append(content[begin:position])
        self.position = position
        # Check all at once that they are UTF-8; the zero byte ends an unfinished character.
        if _is_read(key) and not _is_utf8(b"\0".join(texts)):
            raise _not_utf8(key, next(text for text in texts if not _is_utf8(text)))
        return texts

    def _text(self, longest: int, where: str, what: str) -> bytes:
        (length,) = self.unpack("<Q")
        begin, self.position = self.position, self.position + length
        if length > longest or self.position > len(self.content):
            raise self._too_long(length, begin, longest, where)
        text = self.content[begin : self.position]
        if _is_read(what) and not _is_utf8(text):
            raise _not_utf8(what, text)
        return text

    def _too_long(self, length: int, begin: int, longest: int, where: str) -> MalformedHeaderError:
        return MalformedHeaderError(
            f"it has a string of {length:,} bytes {where}, at byte {begin:,}; the limit is {longest:,}, and "
            f"{len(self.content) - begin:,} bytes are left"
        )

    def _tensor(self) -> GGUFTensorEntry:
        name = self.name("a tensor's name", LONGEST_NAME)
        (dimensions,) = self.unpack("<I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise MalformedHeaderError(
                f"tensor {name!r} has {dimensions:,} dimensions; 1 to {MOST_DIMENSIONS} are possible"
            )
        fastest_first = self.unpack(f"<{dimensions}Q")
        kind, offset = self.unpack("<IQ")
        try:
            quantization = tensor_type(kind)
        except ValueError as error:
            if kind > LARGEST_TYPE:
                raise MalformedHeaderError(f"tensor {name!r} has type {kind}, which does not exist") from error
            raise UnknownTypeError(f"tensor {name!r} has type {kind}, which this version cannot read") from error
        return GGUFTensorEntry(name, fastest_first[::-1], quantization, offset)


def _is_read(what: str) -> bool:
    return what in _READ or not what.startswith(_DESCRIPTION)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _not_utf8(what: str, text: bytes) -> MalformedHeaderError:
    return MalformedHeaderError(f"{what} is {text[:80]!r}, which is not UTF-8")
