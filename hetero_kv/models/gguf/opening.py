"""Keeps what opening a GGUF file finds, its header and its tokenizer, so that later starts read it.

`<packed_home>/<key>/opening` has both, behind their SHA-256. The key is a hash of the file's size, times and inode, of
the code that reads it, and of the versions of what that uses. A thread reads it (`begin_opening`) while the process
imports what computes with the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import marshal
import os
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from hetero_kv.durable_file import write_atomically
from hetero_kv.models.code_digest import MODELS, code_digest
from hetero_kv.models.gguf.file import FileState, GGUFFile, TensorInfo
from hetero_kv.models.gguf.header import MetadataValue
from hetero_kv.models.packed_ahead import PACKED_AHEAD
from hetero_kv.models.packed_folder import SETTLED_NS, makes_room, packed_home

_logger = logging.getLogger(__name__)

OPENING, PACKED = "opening", "packed"
#: Bytes from which on it is kept: a smaller vocabulary is read in no time.
WORTH_KEEPING = 1 << 20
_DIGEST_BYTES = hashlib.sha256().digest_size


class TokenizerParts(NamedTuple):
    """What a tokenizer is made of: `settings` are the arguments of transformers' class beside the backend."""

    backend: Tokenizer
    settings: dict[str, Any]


class Opening(NamedTuple):
    """What opening a file finds."""

    file: GGUFFile
    tokenizer: TokenizerParts


_begun: dict[Path, Future[Opening | None]] = {}


def begin_opening(path: Path) -> None:
    """Read what was kept of a file, in another thread."""
    found: Future[Opening | None] = Future()

    def read() -> None:
        try:
            found.set_result(_read(path))
            _begin_packed(path)
        except Exception as error:
            # What cannot be read here is read from the file.
            _logger.debug("what was kept of %s", path, exc_info=error)
            if not found.done():
                found.set_result(None)

    _begun[path] = found
    threading.Thread(target=read, name="hetero_kv opening").start()


def _begin_packed(path: Path) -> None:
    note = _path(path, FileState.of(os.stat(path))).with_name(PACKED)
    if note.exists():
        PACKED_AHEAD.begin(packed_home() / note.read_text())


def kept_opening(path: Path) -> Opening | None:
    """What was kept of a file that is unchanged, once it is read; None unless that was begun."""
    begun = _begun.pop(path, None)
    found = None if begun is None else begun.result()
    return found if found is not None and found.file.state == FileState.of(os.stat(path)) else None


def keep_opening(opening: Opening, limit: int) -> None:
    """Keep what opening a file has found, if all that is kept takes at most `limit` bytes with it."""
    file, parts = opening
    settled = time.time_ns() - max(file.state.modified, file.state.changed) >= SETTLED_NS
    path = _path(file.path, file.state)
    if file.later_parts or not settled or path.exists():
        return
    written = marshal.dumps(
        {
            "metadata": {key: (value.types, value.value) for key, value in file.metadata.items()},
            "tensors": [
                (each.name, each.shape, int(each.quantization), each.offset, each.nbytes) for each in file.tensors
            ],
            "digest": file.digest,
            "backend": parts.backend.to_str().encode(),
            "settings": parts.settings,
        }
    )
    if not WORTH_KEEPING <= len(written) <= limit:
        return
    try:
        if makes_room(len(written), limit, besides=path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, hashlib.sha256(written).digest() + written)
    except OSError as error:
        _logger.warning("the tokenizer is not kept in %s: %s", path.parent, error)


def note_packed(file: GGUFFile, folder: Path | None) -> None:
    """Note the folder of the packed weights that this start has taken, None for none; the next one reads them ahead."""
    note = _path(file.path, file.state).with_name(PACKED)
    # What is not noted is not read ahead.
    with suppress(OSError):
        if folder is None:
            note.unlink(missing_ok=True)
        elif note.with_name(OPENING).exists() and not (note.exists() and note.read_text() == folder.name):
            write_atomically(note, folder.name)


def _read(path: Path) -> Opening | None:
    """What was kept of a file; None if nothing was, or not of its present state."""
    state = FileState.of(os.stat(path))
    kept = _path(path, state)
    try:
        content = memoryview(kept.read_bytes())
    except FileNotFoundError:
        return None
    written = content[_DIGEST_BYTES:]
    if hashlib.sha256(written).digest() != content[:_DIGEST_BYTES]:
        _logger.warning("%s is damaged; it is made again", kept)
        with suppress(OSError):
            kept.unlink()
        return None
    with suppress(OSError):
        os.utime(kept.parent)
    found = marshal.loads(written)
    tensors = tuple(
        TensorInfo(name, shape, GGMLQuantizationType(kind), offset, nbytes)
        for name, shape, kind, offset, nbytes in found["tensors"]
    )
    values = {key: MetadataValue(*value) for key, value in found["metadata"].items()}
    file = GGUFFile(path, values, tensors, state, found["digest"])
    return Opening(file, TokenizerParts(Tokenizer.from_buffer(found["backend"]), found["settings"]))


def _path(path: Path, state: FileState) -> Path:
    versions = [sys.version, metadata.version("gguf"), metadata.version("tokenizers")]
    identity = [path.name, *state, code_digest(MODELS), *versions]
    return packed_home() / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32] / OPENING
