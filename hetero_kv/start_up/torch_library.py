"""Loads torch's library while other threads of the process run Python."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

# In the order of their loading by `import torch`, which makes the names of the first visible to all.
_LIBRARIES = ("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_cpu.so", ctypes.RTLD_LOCAL)


def load_torch_library() -> None:
    """Load what importing torch loads first, and takes a fifth of its time; the import does what this cannot.

    An import holds the interpreter's lock while it loads a library, and so do `ctypes.CDLL` and a tokenizer that is
    made in another thread (`models.ahead`). Here the lock is free, so that both run at a time.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or sys.platform != "linux":
        return
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, visibility in _LIBRARIES:
        load(os.fsencode(Path(spec.origin).with_name("lib") / name), os.RTLD_NOW | visibility)
