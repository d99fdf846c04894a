"""Ends a command's process."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from typing import NoReturn


def end(status: int) -> NoReturn:
    """End the process as `sys.exit` does, but leave its memory to the system.

    Python frees every object by itself, which takes a quarter of a second with torch and a model in memory. Threads are
    waited for, functions of `atexit` are called and outputs are written as ever.
    """
    if "torch" in sys.modules:
        # What the interpreter does before it frees objects; neither has a public name.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if _written():
            os._exit(status)
    sys.exit(status)


def _written() -> bool:
    """Whether what is printed could be written; otherwise the interpreter says so when it ends."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return False
    # What libraries of C print.
    ctypes.CDLL(None).fflush(None)
    return True
