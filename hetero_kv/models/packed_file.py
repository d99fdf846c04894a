"""A file of packed weights: tensors as the kernels read them, checked when they are read.

The file has MAGIC; the tensors, each from a multiple of a cache line on; a table in JSON; and a trailer with the
table's length and SHA-256. The table has each tensor's place and CRC-32, and the identity of what was packed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetero_kv.cpu_ops.cache_lines import LINE
from hetero_kv.cpu_ops.weight_arena import WEIGHTS
from hetero_kv.durable_file import write_pieces_atomically

#: The name of such a file in its folder.
WEIGHTS_FILE = "weights"
MAGIC = b"HKVPACK1"
# The table's length in bytes, and its SHA-256.
_TRAILER = struct.Struct(f"<Q32s{len(MAGIC)}s")
# The most bytes of a read: the system reads no more at once.
_READ_BYTES = 1 << 30


class DamagedPackedFileError(Exception):
    """A file of packed weights that is not as it was written; the message continues a sentence about the file."""


class Place(NamedTuple):
    """The place of a tensor: its first byte, its number of bytes, and their CRC-32."""

    offset: int
    size: int
    checksum: int


def write_packed(path: Path, identity: Mapping[str, Any], tensors: Iterable[tuple[str, Iterable[np.ndarray]]]) -> None:
    """Write a file; one that another process has written meanwhile stays.

    It does not wait for the disk: after a power cut the checksums tell.

    Args:
        identity: what was packed, as JSON.
        tensors: names, and the bytes of each in pieces, uint8.

    Raises OSError, and the errors of `tensors`; there is no file then.
    """
    write_pieces_atomically(path, _pieces(identity, tensors), replaces=False, survives=False)


def _pieces(
    identity: Mapping[str, Any], tensors: Iterable[tuple[str, Iterable[np.ndarray]]]
) -> Iterator[bytes | memoryview]:
    yield MAGIC
    position, table = len(MAGIC), {}
    for name, parts in tensors:
        padding = -position % LINE
        yield bytes(padding)
        position += padding
        start, checksum = position, 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)  # type: ignore[arg-type]
            yield memoryview(part)  # type: ignore[arg-type]
            position += part.nbytes
        table[name] = Place(start, position - start, checksum)
    text = json.dumps({"identity": identity, "tensors": table}).encode()
    yield text + _TRAILER.pack(len(text), hashlib.sha256(text).digest(), MAGIC)


class PackedFile:
    """An open file of packed weights.

    Attributes:
        places: tensor -> its place.

    Args:
        identity: of what was packed; None for any.

    Raises DamagedPackedFileError for a file that is cut short, has another table than it was written with, or is of
    another identity; OSError if it cannot be read.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any] | None) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            table = self._table()
        except BaseException:
            self.close()
            raise
        if identity is not None and table["identity"] != identity:
            self.close()
            raise DamagedPackedFileError("is of other weights than its name says")
        self.places = {name: Place(*place) for name, place in table["tensors"].items()}
        self._mapped: np.ndarray | None = None

    def _table(self) -> dict[str, Any]:
        size = os.fstat(self._descriptor).st_size
        end = size - _TRAILER.size
        if end < len(MAGIC):
            raise DamagedPackedFileError(f"has {size:,} bytes only")
        length, digest, magic = _TRAILER.unpack(self._read(end, np.empty(_TRAILER.size, np.uint8)).tobytes())
        if magic != MAGIC or length > end - len(MAGIC):
            raise DamagedPackedFileError("is cut short")
        text = self._read(end - length, np.empty(length, np.uint8)).tobytes()
        if hashlib.sha256(text).digest() != digest:
            raise DamagedPackedFileError("has a damaged table")
        table: dict[str, Any] = json.loads(text)
        return table

    def is_same_as(self, other: PackedFile) -> bool:
        """Whether both are one file, which has not changed between."""
        mine, others = os.fstat(self._descriptor), os.fstat(other._descriptor)
        names = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
        return all(getattr(mine, name) == getattr(others, name) for name in names)

    def close(self) -> None:
        """Close the file; mapped tensors stay."""
        os.close(self._descriptor)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(place.size for place in self.places.values())

    def copied(self, name: str) -> np.ndarray:
        """A tensor's bytes in memory, [bytes] uint8. Raises DamagedPackedFileError for others than were written."""
        place = self.places[name]
        return self._checked(name, self._read(place.offset, WEIGHTS.empty(place.size)))

    def mapped(self, name: str) -> np.ndarray:
        """A tensor's bytes as read-only pages of the file, which are read when they are touched, [bytes] uint8."""
        if self._mapped is None:
            self._mapped = np.frombuffer(mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ), np.uint8)
        place = self.places[name]
        return self._mapped[place.offset : place.offset + place.size]

    def check(self) -> None:
        """Read every tensor, and raise DamagedPackedFileError for others than were written."""
        for name in self.places:
            self._checked(name, self.mapped(name))

    def state(self) -> str:
        """The file's state; first waits until all writes are on the disk."""
        os.fsync(self._descriptor)
        found = os.fstat(self._descriptor)
        return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}\n"

    def _checked(self, name: str, data: np.ndarray) -> np.ndarray:
        if zlib.crc32(data) != self.places[name].checksum:  # type: ignore[arg-type]
            raise DamagedPackedFileError(f"has other bytes of {name} than were written")
        return data

    def _read(self, offset: int, room: np.ndarray) -> np.ndarray:
        left = memoryview(room)  # type: ignore[arg-type]
        while left:
            count = os.preadv(self._descriptor, [left[:_READ_BYTES]], offset)
            if not count:
                raise DamagedPackedFileError("is cut short")
            offset, left = offset + count, left[count:]
        return room
