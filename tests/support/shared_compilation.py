"""Where tests run side by side, one process compiles a costly kernel, and the others wait for it and load it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: Module and function of kernels that take ten seconds and more, and that most tests need.
COSTLY = {
    ("block_choice", "choose"),
    ("chosen_tokens", "choose"),
    ("retrieval_kernel", "step"),
}


@contextmanager
def compiled_by_one(folder: Path) -> Iterator[None]:
    """Within this context processes with the same folder compile a costly kernel one after the other.

    The second finds it in Numba's cache. Does nothing where files cannot be locked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    from numba.core.dispatcher import Dispatcher

    original, this_thread = Dispatcher.compile, threading.local()

    def compiled(self: Any, signature: Any) -> Any:
        function = self.py_func.__module__.rpartition(".")[2], self.py_func.__name__
        # Within another compilation this thread has Numba's lock, which the process that it waits for may need.
        if function not in COSTLY or getattr(this_thread, "waits", False):
            return original(self, signature)
        this_thread.waits = True
        try:
            with open(folder / f"{'.'.join(function)}.lock", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                return original(self, signature)
        finally:
            this_thread.waits = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "compile", compiled)
        yield
