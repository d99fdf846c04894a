"""What torch and its OpenMP runtime read once, brought about where they were loaded before this package."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)

# Tensors from this size on lie in large pages where the system has them for those who ask.
_LARGE = 8 << 20
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS, _MAPS_WITH_FLAGS = Path("/proc/self/maps"), Path("/proc/self/smaps")


def spin_briefly() -> None:
    """Have waiting threads of GNU OpenMP, which is loaded, sleep after some microseconds; of other runtimes nothing.

    There is no call for it. But where there are more threads of it than CPUs, it lets them spin for 100 times at most
    (its manual, GOMP_SPINCOUNT), and threads that sleep for ever count too: so many are started, and cost nothing else.
    """
    for path in _loaded("libgomp"):
        threading.Thread(target=_stay, args=(ctypes.CDLL(path),), name="openmp-spare", daemon=True).start()


def _stay(library: Any) -> None:
    """Start more threads than there are CPUs, and keep them: they end with the thread that started them."""
    # What each of them does first, and all that it does, is without effect.
    nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
    library.GOMP_parallel(nothing, None, library.omp_get_num_procs() + 1, 0)
    threading.Event().wait()


def warn_of_small_pages() -> None:
    """Say where torch, which is loaded, has looked already whether tensors are to lie in large pages, and found no."""
    torch = sys.modules["torch"]
    try:
        if "[madvise]" not in _LARGE_PAGES.read_text():
            return
        tensor = torch.empty(_LARGE, dtype=torch.uint8)
        asked = _flags_at(tensor.data_ptr() + _LARGE // 2)
    except (OSError, AttributeError):  # another system, or torch is being imported
        return
    if asked is not None and "hg" not in asked:
        _logger.warning(
            "torch allocated a tensor before hetero_kv was imported, so that large tensors use small pages and "
            "prompts take longer; import hetero_kv first, or set THP_MEM_ALLOC_ENABLE=1 (0: no large pages, no "
            "warning)"
        )


def _loaded(name: str) -> set[str]:
    """The paths of shared libraries of this process whose file's name begins so."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return {path for path in paths if Path(path).name.startswith(name)}


def _flags_at(place: int) -> list[str] | None:
    """What the kernel says of the mapping that an address lies in."""
    is_its = False
    for line in _MAPS_WITH_FLAGS.read_text().splitlines():
        first, _, rest = line.partition("-")
        if line.startswith("VmFlags:"):
            if is_its:
                return line.split()[1:]
        elif rest and ":" not in first:
            is_its = int(first, 16) <= place < int(rest.split()[0], 16)
    return None
