"""The cache of named models: fetches their files once, complete and checked.

`<home>/models/<model>/<file>` exists only after its size and SHA-256 are verified: a file is assembled in a folder next
to it, then renamed. `<file>.verified` next to it records the state of the file that was verified last, so that a start
reads an unchanged file once. `<home>` is the environment variable HETERO_KV_HOME, or ~/.cache/hetero_kv.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hetero_kv.cache_home import cache_home
from hetero_kv.durable_file import write_atomically
from hetero_kv.models.errors import ModelError
from hetero_kv.models.named import ModelFile, NamedModel
from hetero_kv.models.progress import ProgressReport
from hetero_kv.models.sources import FileSource, SourceError, remove_stale

READ_BYTES = 1 << 22
LOCK = "lock"


def fetch(model: NamedModel, report: ProgressReport) -> tuple[Path, ...]:
    """The files of `model` in the cache, in the order of `model.files`; missing or damaged ones are fetched.

    Raises:
        ModelError: every source of a file failed (the message has each one's reason), the disk is full, or the cache
            folder cannot be written.
    """
    present = places(model)
    folder = present[0].parent
    # Without the lock, so that a read-only cache works too; files are only replaced atomically.
    if all(path.is_file() and _is_whole(path, file, report) for path, file in zip(present, model.files, strict=True)):
        _clear(model, folder)
        return present
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A second process waits here, and then finds the file. The system releases the lock when its owner ends.
        with FileLock(folder / LOCK):
            return tuple(_fetch_file(model, file, folder, report) for file in model.files)
    except OSError as error:
        remedy = "set HETERO_KV_HOME to a folder that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some, or set HETERO_KV_HOME to a folder on another disk"
        raise ModelError(f"{model.name} cannot be fetched into {str(folder)!r}: {error.strerror}; {remedy}") from error


def places(model: NamedModel) -> tuple[Path, ...]:
    """Where the files of `model` are in the cache, if they are there."""
    return tuple(cache_home() / "models" / model.name / file.name for file in model.files)


def fetched_bytes(model: NamedModel) -> int:
    """Bytes of a model in the cache, including pieces of files; the model is complete if they equal its `size`."""
    folder = cache_home() / "models" / model.name
    return sum(path.stat().st_size for path in _parts(model, folder) if path.is_file())


def remove(model: NamedModel) -> int:
    """Remove a model from the cache; returns the bytes freed. Processes that have it open can still read it.

    Raises ModelError if it is not in the cache, is being fetched, or cannot be removed.
    """
    folder = cache_home() / "models" / model.name
    taken = fetched_bytes(model)
    if not taken:
        raise ModelError(f"{model.name} is not in {str(folder.parent)!r}; there is nothing to remove")
    try:
        with FileLock(folder / LOCK, timeout=0):
            for file in model.files:
                (folder / file.name).unlink(missing_ok=True)
                _note(folder / file.name).unlink(missing_ok=True)
                if _pieces(folder, file).exists():
                    shutil.rmtree(_pieces(folder, file))
            (folder / LOCK).unlink(missing_ok=True)
    except Timeout as error:
        raise ModelError(f"{model.name} is being fetched by another process; wait for it, or stop it") from error
    except OSError as error:
        raise ModelError(
            f"{model.name} cannot be removed from {str(folder)!r}: {error.strerror}; check the folder's permissions"
        ) from error
    # A folder with other files stays.
    with suppress(OSError):
        folder.rmdir()
    return taken


def _parts(model: NamedModel, folder: Path) -> Iterator[Path]:
    for file in model.files:
        yield folder / file.name
        yield from _pieces(folder, file).rglob("*")


def _clear(model: NamedModel, folder: Path) -> None:
    """Remove pieces of complete files, left by a killed process; skipped while another process fetches."""
    left = [pieces for file in model.files if (pieces := _pieces(folder, file)).exists()]
    if left:
        with suppress(OSError), FileLock(folder / LOCK, timeout=0):
            for pieces in left:
                shutil.rmtree(pieces)


def _pieces(folder: Path, file: ModelFile) -> Path:
    return folder / f"{file.name}.pieces"


def _fetch_file(model: NamedModel, file: ModelFile, folder: Path, report: ProgressReport) -> Path:
    final = folder / file.name
    if final.is_file() and _is_whole(final, file, report):
        shutil.rmtree(_pieces(folder, file), ignore_errors=True)
        return final
    reasons = []
    for number, source in enumerate(file.sources):
        pieces = _pieces(folder, file) / str(number)
        pieces.mkdir(parents=True, exist_ok=True)
        remove_stale(pieces)
        try:
            _check_space(file, source, pieces)
            got = source.fetch(
                pieces, file.size, lambda activity, done: report(activity, min(done, file.size), file.size)
            )
            fault = _fault(got, file, report)
            if fault is not None:
                # The hash covers the whole file, so no piece of it can be trusted.
                shutil.rmtree(pieces)
                raise SourceError(f"{source} provided a different {file.name}: {fault}")
        except SourceError as error:
            reasons.append(str(error))
            continue
        _put(got, final)
        shutil.rmtree(pieces.parent)
        return final
    raise ModelError(
        f"{model.name} could not be fetched; sources tried in order: {'; '.join(reasons)}. "
        f"Check the network, or put the file with SHA-256 {file.sha256} at {str(final)!r}"
    )


def _put(got: Path, final: Path) -> None:
    """Rename a fetched file to its final name, durably: it is complete even after a power cut."""
    try:
        _write_through(got)
        os.replace(got, final)
    except BaseException:
        got.unlink(missing_ok=True)  # as large as the file, on a disk that may be full
        raise
    _write_through(final.parent)


def _write_through(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(file: ModelFile, source: FileSource, pieces: Path) -> None:
    present = sum(path.stat().st_size for path in pieces.rglob("*") if path.is_file())
    needed = int(file.size * source.disk_factor) - present
    free = shutil.disk_usage(pieces).free
    if free < needed:
        raise ModelError(
            f"{file.name} needs {needed / 1e6:,.0f} MB of disk space while it is fetched, and {str(cache_home())!r} "
            f"has {free / 1e6:,.0f} MB free; free some, or set HETERO_KV_HOME to a folder on another disk"
        )


def _is_whole(path: Path, file: ModelFile, report: ProgressReport) -> bool:
    """Whether `path` matches `file`; it is read unless it is as it was when it last did."""
    state, note = _state(path, file), _note(path)
    with suppress(OSError):
        if note.read_text() == state:
            return True
    if _fault(path, file, report) is not None:
        return False
    # A cache that cannot be written is read at every start.
    with suppress(OSError):
        write_atomically(note, state)
    return True


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")


def _state(path: Path, file: ModelFile) -> str:
    """The hash that `path` should have, and what changes when the file does."""
    found = path.stat()
    return f"{file.sha256} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}\n"


def _fault(path: Path, file: ModelFile, report: ProgressReport) -> str | None:
    """Describes how `path` differs from `file` in size or SHA-256; None if it matches."""
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size:,} bytes instead of {file.size:,}"
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(READ_BYTES):
            digest.update(block)
            report("checking", content.tell(), size)
    if digest.hexdigest() != file.sha256:
        return f"its SHA-256 is {digest.hexdigest()} instead of {file.sha256}"
    return None
