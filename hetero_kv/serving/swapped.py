"""Sequences of preempted requests, swapped to files until there is memory for them again."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import weakref
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hetero_kv.contexts.cache_pieces import can_be_saved
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.identity import Identity
from hetero_kv.contexts.restoring import Shapes, restore
from hetero_kv.contexts.saving import shapes_of
from hetero_kv.contexts.writing import write_context
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.cache_factory import ModelState
from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import HeteroKVError, brief_error

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Swapped:
    """A sequence in a file.

    Attributes:
        path: its file.
        tokens: its length.
        computed_under: the cache's (`HeteroCache.computed_under`).
    """

    path: Path
    tokens: int
    computed_under: tuple[ModelState, ...]
    _shapes: Shapes

    def restore(self, empty: HeteroCache) -> None:
        """Fill an empty cache, which then continues as the written one, bit for bit.

        Raises ContextError if the file cannot be read, or its content differs from what was written, and CacheFullError
        without free blocks.
        """
        try:
            with closing(OpenContext.at(self.path)) as context:
                restore(empty, context, self._shapes, verify=True)
        except ContextError as error:
            raise ContextError(
                f"the request waited for memory in {self.path.parent}, from where it cannot be read again ({error}); "
                "send it again, and set TMPDIR to a folder on a sound disk"
            ) from error
        empty.computed_under = self.computed_under

    def remove(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self.path.unlink()


class SwapFolder:
    """Writes sequences to a temporary folder, which only this user may enter (0700).

    The folder is created in TMPDIR with the first file, and removed by `close`, or when the interpreter ends. Its files
    do not outlive the process, so they need no identity of the weights and no fsync.

    Args:
        injection: the rules of the caches (`model.hetero_kv_injection`).

    Attributes:
        error: why the last sequence was not written; None if it was. The caller clears it to try again.
    """

    def __init__(self, injection: Any) -> None:
        self._injection = injection
        self._saves = can_be_saved(injection.cache_layers())
        self._folder: Path | None = None
        self._removal: weakref.finalize[..., SwapFolder] | None = None
        self._written = 0
        self.error: Exception | None = None

    @property
    def is_usable(self) -> bool:
        """Whether sequences can be written, as far as is known."""
        return self._saves and self.error is None

    @cached_property
    def _shapes(self) -> Shapes:
        return shapes_of(self._injection)

    @cached_property
    def _identity(self) -> Identity:
        # The process that reads the file has the same model, and the cache knows its weights (`computed_under`).
        return Identity.of(self._injection.model, self._injection.attention_operators())

    def put(self, cache: HeteroCache) -> Swapped | None:
        """Write the sequence of a cache, which stays as it is. Returns None, and sets `error`, if that fails."""
        if self.error is not None:
            return None
        try:
            return self._put(cache)
        except Exception as error:
            self.error = error
            _logger.warning("%s", self.failure())
            return None

    def failure(self) -> HeteroKVError:
        """The error of a request that fits neither into memory nor onto the disk."""
        assert self.error is not None
        cause = brief_error(self.error.__cause__ or self.error)
        return HeteroKVError(
            f"the store has no memory for another token of every request, and none can wait in {self._where} "
            f"({cause}); free disk space there, set TMPDIR to a folder with more, or give the engine more tokens "
            "(kv_tokens)"
        )

    def _put(self, cache: HeteroCache) -> Swapped:
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="hetero-kv-"))
            except OSError as error:
                raise ContextError(
                    f"no temporary folder can be made in {tempfile.gettempdir()} ({brief_error(error)})"
                ) from error
            self._removal = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / f"{self._written}.safetensors"
        self._written += 1
        with cache.alone():
            write_context(path, cache, self._identity, None, survives=False)
        return Swapped(path, cache.get_seq_length(), cache.computed_under, self._shapes)

    @property
    def _where(self) -> str:
        return tempfile.gettempdir() if self._folder is None else str(self._folder)

    def close(self) -> None:
        """Remove the folder with all of its files."""
        if self._removal is not None:
            self._removal()
            self._folder = self._removal = None
