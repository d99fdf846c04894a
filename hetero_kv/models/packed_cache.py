"""Keeps packed weights on the disk, so that a later start reads them instead of packing them again.

A folder of `packed_folder.packed_home()` has the weights of one model file as one version of this package packs them.
Its name is a hash of the file's header, of its size, times and inode, of the code that packs, and of what is packed. A
file that is changed in any way thus gets another folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.durable_file import write_atomically
from hetero_kv.models.code_digest import MODELS, code_digest
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.packed_file import WEIGHTS_FILE, DamagedPackedFileError, PackedFile, write_packed
from hetero_kv.models.packed_folder import SETTLED_NS, makes_room, packed_home

_logger = logging.getLogger(__name__)

VERIFIED = "verified"
#: Bytes from which on packed weights are kept: fewer are packed in no time.
WORTH_KEEPING = 32 << 20


@dataclass(frozen=True)
class PackedCache:
    """The cache, as a process uses it.

    Attributes:
        limit: bytes that all packed weights may take on the disk; 0 keeps none.
        room: bytes of packed weights that are copied into memory; more are mapped, and read when they are used.
    """

    limit: int
    room: int

    def is_for(self, file: GGUFFile, size: int) -> bool:
        """Whether `size` bytes of packed weights of a file are kept."""
        newest = max(max(part.state.modified, part.state.changed) for part in file.parts)
        return WORTH_KEEPING <= size <= self.limit and time.time_ns() - newest >= SETTLED_NS

    def maps(self, size: int) -> bool:
        """Whether `size` bytes of packed weights are mapped, not copied."""
        return size > self.room

    def kept(
        self, file: GGUFFile, packed: Iterable[str], size: int, tensors: Iterator[tuple[str, Iterable[np.ndarray]]]
    ) -> PackedFile | None:
        """The packed weights of a file, which are written first if they are missing; None if they cannot be.

        Args:
            packed: what decides the packed bytes, for every tensor.
            size: bytes of all.
            tensors: names and packed bytes, computed as they are written.

        Raises the errors of `tensors`.
        """
        identity = _identity(file, packed)
        key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        folder = packed_home() / key
        path = folder / WEIGHTS_FILE
        found = self._intact(path, identity)
        if found is None:
            try:
                if not makes_room(size, self.limit, besides=folder):
                    return None
                folder.mkdir(parents=True, exist_ok=True)
                write_packed(path, identity, tensors)
                found = PackedFile(path, identity)
            except (OSError, DamagedPackedFileError) as error:
                _logger.warning("packed weights are not kept in %s: %s", folder, error)
                return None
        with suppress(OSError):
            os.utime(folder)
        return found

    def _intact(self, path: Path, identity: dict[str, Any]) -> PackedFile | None:
        """The file at `path`; None if there is none. A damaged one is removed."""
        try:
            found = PackedFile(path, identity)
            if self.maps(found.size):
                _require_verified(found)
        except FileNotFoundError:
            return None
        except (DamagedPackedFileError, OSError) as error:
            discard(path, error)
            return None
        return found


def discard(path: Path, error: Exception) -> None:
    """Remove a damaged file; the log says why."""
    _logger.warning("%s %s; the weights are packed again", path, error)
    with suppress(OSError):
        path.unlink()


def _require_verified(found: PackedFile) -> None:
    """Check all tensors of a file that will be mapped, unless it is as it was when they were checked last."""
    note = found.path.with_name(VERIFIED)
    with suppress(OSError):
        if note.read_text() == found.state():
            return
    try:
        found.check()
    except DamagedPackedFileError:
        found.close()
        raise
    # A cache that cannot be written is checked at every start.
    with suppress(OSError):
        write_atomically(note, found.state())


def _identity(file: GGUFFile, packed: Iterable[str]) -> dict[str, Any]:
    return {
        "code": _code_version(),
        "model": file.path.name,
        "files": [[part.digest, *part.state] for part in file.parts],
        "packed": hashlib.sha256("\n".join(packed).encode()).hexdigest(),
    }


def _code_version() -> str:
    """A hash of the code that reads and packs weights."""
    return f"{CODE_VERSION} {code_digest(MODELS, MODELS.parent / 'weights')}"
