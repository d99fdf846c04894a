"""Files that appear complete or not at all, and that a power cut does not take back."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: What is added to a file's name while it is written. One that a killed process left is written over by the next.
PARTIAL = ".partial"

# File systems without directories of their own to write out say so in one of these ways.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def write_atomically(path: Path, content: str | bytes, *, replaces: bool = True) -> None:
    """Write `path` through a file beside it that takes its name once all of it is on the disk.

    Its permissions are those that the process's umask leaves. Processes that write the same file do so one by one.

    Args:
        content: bytes, or text that is written as UTF-8.
        replaces: whether a file that is there gives way; without, it stays as it is.

    Raises:
        OSError: it cannot be written, as on a full disk. What was there is untouched, and nothing is left beside it.
    """
    encoded = content.encode() if isinstance(content, str) else content
    write_pieces_atomically(path, [encoded], replaces=replaces)


def write_pieces_atomically(path: Path, pieces: Iterable[bytes | memoryview], *, replaces: bool = True) -> None:
    """As `write_atomically`, of what `pieces` gives one after the other; what it raises leaves the file as it was."""
    partial = path.with_name(path.name + PARTIAL)
    descriptor = _locked(partial)
    try:
        if not replaces and os.path.lexists(path):
            os.unlink(partial)
            return
        with open(descriptor, "wb", closefd=False) as file:
            file.truncate(0)
            for piece in pieces:
                file.write(piece)
        os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def move_durably(source: Path, target: Path) -> None:
    """Give a finished file its name, in place of what has it now; after a power cut it is there, with its content.

    Raises OSError; `target` is as it was then, unless only the writing out of its folder failed.
    """
    descriptor = os.open(source, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can say so. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def _locked(partial: Path) -> int:
    """A descriptor of the file `partial`, which no other process writes to until it is closed."""
    while True:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Whoever had the lock before has renamed the file or removed it: then this is another file by now.
            if os.path.samestat(os.fstat(descriptor), os.stat(partial, follow_symlinks=False)):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
