"""A folder that caches files of a slower place: beyond a limit the least recently used ones are removed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

from hetero_kv.durable_file import write_pieces_atomically


class DiskCache:
    """Files by name. Several processes may use one folder.

    Args:
        folder: exists.
        limit: bytes of all files together; None for no limit.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.folder, self.limit = folder, limit

    def has(self, name: str) -> bool:
        """Whether a file is here; it is then the most recently used one."""
        path = self.folder / name
        try:
            # The time of change stays: a file that changes while it is mapped is refused.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        except FileNotFoundError:
            return False
        return True

    def add(self, name: str, content: bytes) -> None:
        """Write a file, unless it is here. Raises OSError."""
        write_pieces_atomically(self.folder / name, [content], replaces=False, survives=False)

    def shrink(self, kept: Collection[str], suffix: str) -> None:
        """Remove the least recently used files that end with `suffix`, except `kept` ones, down to the limit."""
        if self.limit is None:
            return
        files = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith(suffix):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    files.append((max(status.st_atime, status.st_mtime), status.st_size, entry.name))
        total = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if total <= self.limit:
                return
            if name not in kept:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.folder / name)
                total -= size
