"""Files that lie in the memory of a cache, watched: what others change of them would change what is stored."""

from __future__ import annotations

import os

from hetero_kv.engine.errors import DamagedContextError


class MappedFile:
    """A file of a saved context that pools are laid over.

    Files of contexts are written once, and never changed in place. Where somebody does so all the same, blocks that
    were not read yet would hold something else; and to read what was cut off ends the process (SIGBUS).

    Args:
        path: as it was opened, for messages.
        descriptor: of the open file; this one keeps another of its own.
        status: of the file, from before anything of it was checked.
    """

    def __init__(self, path: str, descriptor: int, status: os.stat_result) -> None:
        self.path = path
        self._known = _state(status)
        self._descriptor = os.dup(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def require_unchanged(self) -> None:
        """Raise DamagedContextError where somebody has written to the file, or cut it off, since it was opened."""
        now = _state(os.fstat(self._descriptor))
        if now == self._known:
            return
        (size, _), (size_now, _) = self._known, now
        how = "was changed" if size_now == size else f"had {size:,} bytes and has {size_now:,}"
        raise DamagedContextError(
            f"{self.path} {how} while a context was in use that lies in it: what comes next would be wrong; load the "
            "context again, which names what is damaged and computes it anew from its tokens"
        )


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
