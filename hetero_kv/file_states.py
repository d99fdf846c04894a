"""What changes when the files in a folder do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def file_states(folder: Path) -> Iterator[str]:
    """The path, size and times of every file below a folder, in order, but for compiled modules."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not entry.is_dir():
                yield file_state(entry)
            elif entry.name != "__pycache__":
                yield from file_states(Path(entry))


def file_state(path: os.DirEntry[str] | Path) -> str:
    """The path, size and times of a file."""
    state = path.stat()
    return f"{os.fspath(path)} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"
