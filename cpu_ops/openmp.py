"""Spin time and page size for processes that loaded torch before this package: torch reads both only once."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)

# torch requests large pages for tensors from this size on, where the system grants them on request.
_LARGE = 8 << 20
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS, _MAPS_WITH_FLAGS = Path("/proc/self/maps"), Path("/proc/self/smaps")


def spin_briefly() -> None:
    """Make waiting threads of a loaded GNU OpenMP sleep after some microseconds; other runtimes are not changed.

    GNU OpenMP has no function for that. But with more threads than CPUs it spins at most 100 times (its manual,
    GOMP_SPINCOUNT), and sleeping threads count. So this function starts that many threads, which sleep for ever.
    """
    for path in _loaded("libgomp"):
        threading.Thread(target=_stay, args=(ctypes.CDLL(path),), name="openmp-spare", daemon=True).start()


def _stay(library: Any) -> None:
    """Start more threads than CPUs, and keep them: they would end with the thread that started them."""
    # The function that every thread runs has no effect.
    nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
    library.GOMP_parallel(nothing, None, library.omp_get_num_procs() + 1, 0)
    threading.Event().wait()


def warn_of_small_pages() -> None:
    """Warn if a loaded torch has already read its setting of large pages, and does not use them."""
    torch = sys.modules["torch"]
    try:
        if "[madvise]" not in _LARGE_PAGES.read_text():
            return
        tensor = torch.empty(_LARGE, dtype=torch.uint8)
        flags = _flags_at(tensor.data_ptr() + _LARGE // 2)
    except (OSError, AttributeError):  # another system, or torch is being imported
        return
    if flags is not None and "hg" not in flags:
        _logger.warning(
            "torch allocated a tensor before hetero_kv was imported, so that large tensors use small pages and "
            "prompts take longer; import hetero_kv first, or set THP_MEM_ALLOC_ENABLE=1 (0: no large pages, no "
            "warning)"
        )


def _loaded(name: str) -> set[str]:
    """The paths of this process's shared libraries whose file names start with `name`."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return {path for path in paths if Path(path).name.startswith(name)}


def _flags_at(place: int) -> list[str] | None:
    """The kernel's flags of the mapping that contains address `place`; None if they are unknown."""
    is_its = False
    for line in _MAPS_WITH_FLAGS.read_text().splitlines():
        first, _, rest = line.partition("-")
        if line.startswith("VmFlags:"):
            if is_its:
                return line.split()[1:]
        elif rest and ":" not in first:
            is_its = int(first, 16) <= place < int(rest.split()[0], 16)
    return None
