"""Keeps transformers' lists of classes on the disk, for which it reads the source of all its models twice a start.

`<packed_home>/<key>/class_lists` has them, behind their SHA-256. The key is a hash of the name, the size and the times
of every file that they come from and of the file with the code that makes them, and of Python's version.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hetero_kv.durable_file import write_atomically
from hetero_kv.file_states import file_state, file_states
from hetero_kv.models.packed_folder import packed_home

FILE = "class_lists"
_DIGEST_BYTES = hashlib.sha256().digest_size


def keep_class_lists(module: Any) -> None:
    """Let transformers' module `utils.import_utils` list the classes of `transformers.models` from the disk."""
    read = getattr(module, "create_import_structure_from_path", None)
    if read is None:
        return
    code = Path(module.__file__)
    folder = code.parents[1] / "models"

    @cache
    def lists() -> bytes:
        return _kept(_path(code, folder), lambda: read(folder))

    def kept(path: str | os.PathLike[str]) -> Any:
        """The lists of a folder, or of the folder of a file."""
        if Path(path) in (folder, folder / "__init__.py"):
            return marshal.loads(lists())
        return read(path)

    module.create_import_structure_from_path = kept


def _path(code: Path, folder: Path) -> Path:
    digest = hashlib.sha256(f"{sys.version} {marshal.version} {folder}\n".encode())
    for state in (file_state(code), *file_states(folder)):
        digest.update(f"{state}\n".encode())
    return packed_home() / digest.hexdigest()[:32] / FILE


def _kept(path: Path, make: Callable[[], Any]) -> bytes:
    """The lists at `path`, marshalled; made and put there first if they are missing or damaged."""
    with suppress(OSError):
        found = path.read_bytes()
        digest, lists = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        if hashlib.sha256(lists).digest() == digest:
            os.utime(path.parent)
            return lists
    made = marshal.dumps(make())
    # Where nothing can be written, they are made at every start.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, hashlib.sha256(made).digest() + made)
    return made
