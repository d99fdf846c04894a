"""Reads the header of a GGUF file: its metadata and the positions of its tensors.

A model may be split into several files (`split_files.py`), which are read as one. A file that violates the requirements
of `docs/gguf_files.md` is refused by name. No tensor is read here.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.contract import (
    alignment,
    check_blocks,
    check_metadata,
    check_places,
    stored_bytes,
)
from hetero_kv.models.gguf.header import (
    ARRAY,
    HEADER_BYTES,
    STRING,
    HeaderCursor,
    MalformedHeaderError,
    MetadataValue,
    PartOfModelError,
    UnknownTypeError,
)
from hetero_kv.models.gguf.split_files import check_parts, part_count, part_paths
from hetero_kv.weights.tensor_types import TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Enough for vocabularies of 150,000 tokens; a longer header is read again in full.
USUAL_HEADER_BYTES = 8 << 20
_DAMAGE = (struct.error, MalformedHeaderError)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's position: `shape` in torch's order (slowest dimension first), `offset` from its file's start.

    part: the number of its file, from 0, if the model is split into several.
    """

    name: str
    shape: tuple[int, ...]
    quantization: TensorType
    offset: int
    nbytes: int
    part: int = 0


class FileState(NamedTuple):
    """A file's state: its size in bytes, the times of changes to it, nanoseconds, and its inode."""

    size: int
    modified: int
    changed: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """The state of a file by its status."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class GGUFFile:
    """The header of the GGUF file at `path`; `state` is the file's when it was read.

    Attributes:
        digest: the SHA-256 of the header in hexadecimal.
        tensors: those of all parts.
        later_parts: the headers of the second and further files of a split model.
    """

    path: Path
    metadata: dict[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]
    state: FileState
    digest: str
    later_parts: tuple[GGUFFile, ...] = ()

    @classmethod
    def read(cls, path: Path) -> GGUFFile:
        """Read the header of `path`, and of the other parts in its folder if the model is split.

        Raises:
            ModelError: the file or a part of the model is missing, is no GGUF file, has an unsupported version or byte
                order, violates the requirements, or is shorter than its header says.
        """
        given = _read(path)
        whole = given
        with _damage_of(path, given.state):
            if part_count(given.metadata) > 1:
                parts = [given if part == path else _read(part) for part in part_paths(given)]
                check_parts(parts)
                tensors = [replace(info, part=number) for number, part in enumerate(parts) for info in part.tensors]
                whole = replace(parts[0], tensors=tuple(tensors), later_parts=tuple(parts[1:]))
            if "general.architecture" not in whole.metadata:
                kind = whole.get("general.type")
                what = "convert it again" if kind is None else f"it is of general.type {kind!r}: give a model's file"
                raise ModelError(f"{str(whole.path)!r} has no general.architecture in its metadata; {what}")
            check_blocks(whole.metadata, whole.tensors)
        return whole

    @property
    def architecture(self) -> str:
        """The kind of model, in the file's own spelling (`qwen2`, `llama`)."""
        return str(self.get("general.architecture"))

    @property
    def tensor_names(self) -> frozenset[str]:
        """The names of the tensors, as GGUF spells them (`output.weight`)."""
        return frozenset(tensor.name for tensor in self.tensors)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value `key` with decoded strings; `default` if the file lacks it.

        Descriptions in another encoding than UTF-8 have replaced characters; other text was checked.
        """
        entry = self.metadata.get(key)
        if entry is None:
            return default
        if entry.types == (STRING,):
            return entry.value.decode(errors="replace")
        if entry.types == (ARRAY, STRING):
            return _decoded(entry.value)
        return entry.value

    @property
    def parts(self) -> tuple[GGUFFile, ...]:
        """The headers of the model's files, in order."""
        return self, *self.later_parts

    def open(self) -> BinaryIO:
        """The open file, to read tensors from. Raises ModelError if it has changed since its header was read."""
        try:
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise ModelError(f"{str(self.path)!r} cannot be read: {error.strerror}; load it again") from error
        if _state(file) != self.state:
            file.close()
            raise self.changed()
        return file

    def changed(self) -> ModelError:
        """The error for a file that changes while it is read."""
        return ModelError(f"{str(self.path)!r} was changed while it was read; load it again when it is complete")


def _decoded(texts: list[bytes]) -> list[str]:
    """The strings of UTF-8; at once where none has a zero byte, for a vocabulary has hundreds of thousands."""
    with suppress(UnicodeDecodeError):
        together = b"\0".join(texts).decode().split("\0")
        if len(together) == len(texts):
            return together
    return [text.decode(errors="replace") for text in texts]


def _read(path: Path) -> GGUFFile:
    """The header of one file, which may be a part of a model."""
    if not path.is_file():
        raise ModelError(f"there is no GGUF file {str(path)!r}; check the path")
    try:
        with path.open("rb") as file:
            state = _state(file)
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{str(path)!r} does not begin with the letters GGUF; give a file in GGUF format")
            with _damage_of(path, state):
                content = MAGIC + file.read(USUAL_HEADER_BYTES)
                try:
                    return _header(path, content, state)
                except _DAMAGE:
                    rest = file.read(HEADER_BYTES - len(content))
                    if not rest:
                        raise
                return _header(path, content + rest, state)
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror}; check its permissions") from error


@contextmanager
def _damage_of(path: Path, state: FileState) -> Iterator[None]:
    """Within this context, errors of a damaged header become ModelErrors that name its file."""
    try:
        yield
    except UnknownTypeError as error:
        raise ModelError(
            f"{str(path)!r}: {error}; give a file in another quantization, or install a newer version of gguf"
        ) from error
    except PartOfModelError as error:
        raise ModelError(f"{str(path)!r} has {error}; give the file of the model itself") from error
    except _DAMAGE as error:
        what = error if isinstance(error, MalformedHeaderError) else "it ends too early"
        raise ModelError(
            f"the header of {str(path)!r} ({state.size:,} bytes) is damaged or cut short: {what}; "
            "download the file again, or convert it again"
        ) from error


def _state(file: Any) -> FileState:
    return FileState.of(os.fstat(file.fileno()))


def _header(path: Path, content: bytes, state: FileState) -> GGUFFile:
    cursor = HeaderCursor(content, len(MAGIC))
    (version,) = cursor.unpack("<I")
    if version and version & 0xFFFF == 0:
        raise ModelError(f"{str(path)!r} was written for big-endian machines; convert it to little-endian GGUF")
    if version not in VERSIONS:
        raise ModelError(f"{str(path)!r} is GGUF version {version}; versions 2 and 3 are supported: convert it again")
    tensor_count, entry_count = cursor.counts()
    metadata = cursor.metadata(entry_count)
    check_metadata(metadata)
    entries = cursor.tensors(tensor_count)
    each = alignment(metadata)
    start = -(-cursor.position // each) * each
    end = start + check_places(entries, each)
    if entries:
        _check_length(path, end, state.size, each)
    tensors = tuple(
        TensorInfo(entry.name, entry.shape, entry.quantization, start + entry.offset, stored_bytes(entry))
        for entry in entries
    )
    return GGUFFile(path, metadata, tensors, state, hashlib.sha256(content[: cursor.position]).hexdigest())


def _check_length(path: Path, end: int, size: int, each: int) -> None:
    if end > size:
        raise ModelError(
            f"{str(path)!r} is cut short: its tensors end at byte {end:,} and it has {size:,}; download the file again"
        )
    # The last tensor may be padded like the others.
    if size > -(-end // each) * each:
        raise MalformedHeaderError(f"it has {size - end:,} bytes after the last of its tensors")
