"""Files mapped into a cache's memory, checked for changes: a change to such a file would change stored KV."""

from __future__ import annotations

import os

from hetero_kv.engine.errors import DamagedContextError


class MappedFile:
    """A file of a saved context whose contents back pools in memory.

    Files of contexts are written once and never changed in place. If someone changes one, blocks not yet read get other
    contents; and a read beyond the end of a truncated file ends the process (SIGBUS).

    Args:
        path: as it was opened, for messages.
        descriptor: of the open file; the instance keeps a duplicate.
        status: of the file, taken before anything in it was checked.
    """

    def __init__(self, path: str, descriptor: int, status: os.stat_result) -> None:
        self.path = path
        self._known = _state(status)
        self._descriptor = os.dup(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def require_unchanged(self) -> None:
        """Raise DamagedContextError when the file was written to or truncated since it was opened."""
        now = _state(os.fstat(self._descriptor))
        if now == self._known:
            return
        (size, _), (size_now, _) = self._known, now
        how = "was changed" if size_now == size else f"had {size:,} bytes and has {size_now:,}"
        raise DamagedContextError(
            f"{self.path} {how} while a context was mapped from it, and further answers would be wrong; load the "
            "context again, which names the damaged blocks and recomputes them from their tokens"
        )


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
