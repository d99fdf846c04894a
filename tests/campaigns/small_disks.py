"""Small disks: file systems in memory that only one child process sees."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from tests.campaigns.kills import forked

# As unshare(2) and mount(2) have them.
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_PRIVATE = 1 << 18 | 1 << 14
_IS_REFUSED = 7


def is_possible(folder: Path) -> bool:
    """Whether this system lets a process have one."""
    return on_small_disk(folder, 1 << 20, lambda: None)


def on_small_disk(folder: Path, size: int, work: Callable[[], None]) -> bool:
    """Do `work` in a child, for which `folder` is a disk of `size` bytes; whether there was one.

    Raises ChildProcessError where the work failed.
    """

    def mounted() -> None:
        try:
            _mount(folder, size)
        except OSError:
            os._exit(_IS_REFUSED)
        work()

    status = os.waitstatus_to_exitcode(os.waitpid(forked(mounted), 0)[1])
    if status not in (0, _IS_REFUSED):
        raise ChildProcessError(f"what was done on a small disk ended with {status}")
    return status == 0


def _mount(folder: Path, size: int) -> None:
    """Mount a small disk in a mount namespace of this process."""
    if os.getuid():
        own = f"0 {os.getuid()} 1"
        _require(_libc().unshare(_NEW_MOUNTS | _NEW_USER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(own)
    else:
        _require(_libc().unshare(_NEW_MOUNTS))
    _require(_libc().mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None))
    options = f"size={size}".encode()
    _require(_libc().mount(b"tmpfs", str(folder).encode(), b"tmpfs", ctypes.c_ulong(0), options))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _require(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "refused")
