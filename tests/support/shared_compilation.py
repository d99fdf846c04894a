"""Where tests run side by side, one process compiles a kernel, and the others wait for it and load it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def compiled_by_one(folder: Path) -> Iterator[None]:
    """Within this context processes with the same folder compile a kernel one after the other.

    The second finds it in Numba's cache. Kernels of one function for other shapes, and functions that are not kept
    there, are compiled at once. Does nothing where files cannot be locked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    from numba.core.caching import Cache
    from numba.core.dispatcher import Dispatcher

    original, this_thread = Dispatcher.compile, threading.local()

    def compiled(self: Any, signature: Any) -> Any:
        # Within another compilation this thread has Numba's lock, which the process that it waits for may need.
        if getattr(this_thread, "compiles", False):
            return original(self, signature)
        this_thread.compiles = True
        try:
            if not isinstance(self._cache, Cache):
                return original(self, signature)
            with open(folder / f"{self.py_func.__name__}.{_key(self, signature)}.lock", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                return original(self, signature)
        finally:
            this_thread.compiles = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "compile", compiled)
        yield


def _key(dispatcher: Any, signature: Any) -> str:
    """What tells a kernel from others: its module, and by what Numba's cache finds it there."""
    found = dispatcher._cache._index_key(signature, dispatcher.targetctx.codegen())
    return hashlib.sha256(f"{dispatcher.py_func.__module__} {found}".encode()).hexdigest()
