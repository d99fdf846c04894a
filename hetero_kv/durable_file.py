"""Writes files that appear complete or not at all, and survive a power cut."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: Suffix of a file while it is written. The next write overwrites one that a killed process left.
PARTIAL = ".partial"

# Errors of file systems that cannot sync a directory.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def write_atomically(path: Path, content: str | bytes, *, replaces: bool = True) -> None:
    """Write `path` through a temporary file in the same folder, which is renamed once it is on the disk.

    The umask decides its permissions. Processes that write the same file wait for each other.

    Args:
        content: bytes, or text that is written as UTF-8.
        replaces: whether an existing file is replaced; if not, it stays.

    Raises:
        OSError: it cannot be written, as on a full disk. An existing file is unchanged, and no temporary file remains.
    """
    encoded = content.encode() if isinstance(content, str) else content
    write_pieces_atomically(path, [encoded], replaces=replaces)


def write_pieces_atomically(
    path: Path, pieces: Iterable[bytes | memoryview], *, replaces: bool = True, survives: bool = True
) -> None:
    """Like `write_atomically`, of the pieces in order. If `pieces` raises, the file is unchanged.

    survives: whether the file survives a power cut, for which the call waits for the disk.
    """
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
        if survives:
            os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    finally:
        os.close(descriptor)
    if survives:
        sync_folder(path.parent)


def move_durably(source: Path, target: Path) -> None:
    """Rename a finished file, replacing `target`; after a power cut it exists with its content.

    Raises OSError. `target` is unchanged then, unless only syncing its folder failed.
    """
    descriptor = os.open(source, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, if the file system supports it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def _locked(partial: Path) -> int:
    """A locked descriptor of the file `partial`: no other process writes to it until it is closed."""
    while True:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The lock's last owner has renamed or removed the file: `partial` may be another file now.
            if os.path.samestat(os.fstat(descriptor), os.stat(partial, follow_symlinks=False)):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
