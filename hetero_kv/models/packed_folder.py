"""The folder of packed weights: its size, and room in it. Each folder in it has those of one model file."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from pathlib import Path

from hetero_kv.cache_home import cache_home

_logger = logging.getLogger(__name__)
#: A model file that was written less than this many nanoseconds ago may be written again without another time.
SETTLED_NS = 2_000_000_000
# The share of the free disk that the packed weights of one file may take.
_FREE_SHARE = 0.5


def packed_home() -> Path:
    """The folder of all packed weights."""
    return cache_home() / "packed"


def packed_sizes() -> dict[Path, int]:
    """Folder -> the bytes in it, least recently used first."""
    home = packed_home()
    folders = [path for path in home.iterdir() if path.is_dir()] if home.is_dir() else []
    return {path: _bytes_of(path) for path in sorted(folders, key=_last_use)}


def clear_packed() -> int:
    """Remove all packed weights; returns the bytes freed. Processes that have them open go on.

    Raises OSError for what cannot be removed.
    """
    freed = sum(packed_sizes().values())
    if packed_home().is_dir():
        shutil.rmtree(packed_home())
    return freed


def makes_room(size: int, limit: int, *, besides: Path) -> bool:
    """Whether `size` bytes fit on the disk; removes the least recently used weights until all take `limit` bytes.

    Nothing is removed if they do not fit even then.

    besides: the folder that the bytes are for, which stays. Raises OSError if the folder or the disk cannot be read.
    """
    home = packed_home()
    sizes = packed_sizes()
    sizes.pop(besides, None)
    left, removed = sum(sizes.values()), []
    for path, freed in sizes.items():
        if left + size <= limit:
            break
        removed.append(path)
        left -= freed
    free = shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists())).free
    free += sum(sizes[path] for path in removed)
    if size > _FREE_SHARE * free:
        _logger.warning(
            "packed weights are not kept: they take %.1f GB, and %.1f GB are free at %s; packed_cache_gb=0 keeps none",
            size / 1e9, free / 1e9, home,
        )  # fmt: skip
        return False
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return True


def _bytes_of(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def _last_use(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:  # another process has removed it
        return 0
