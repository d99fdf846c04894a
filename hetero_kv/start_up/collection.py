"""Garbage collection while a command starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_deferred() -> Iterator[None]:
    """Within this context nothing is collected; what exists at the end of the process's first one never is.

    For commands, whose modules and model live as long as the process. Importing torch and transformers makes a million
    objects, and collections that find nothing to free take a quarter of a command's start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Once, so that a process that runs several commands frees the models of all but the first.
        if not gc.get_freeze_count():
            gc.freeze()
        if was_enabled:
            gc.enable()
