"""Reads packed weights while the process still imports what computes with them.

The file is the one of the last start with the same model file (`opening.note_packed`). If this start takes another,
or none, what was read is dropped.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import numpy as np

from hetero_kv.models.packed_file import WEIGHTS_FILE, DamagedPackedFileError, PackedFile

_logger = logging.getLogger(__name__)


class PackedReader:
    """Reads every tensor of a packed file once: in a thread of its own, or in the thread that takes it first."""

    def __init__(self, file: PackedFile) -> None:
        self.file = file
        self._lock, self._is_over = threading.Lock(), False
        self._found: dict[str, Future[np.ndarray]] = {}
        # It may be left alone in the middle of a read when the process ends.
        self._thread = threading.Thread(target=self._read, name="hetero_kv weights", daemon=True)
        self._thread.start()

    def copied(self, name: str) -> np.ndarray:
        """A tensor's bytes in memory, as of `PackedFile.copied`."""
        with self._lock:
            found = self._found.get(name)
            is_first = found is None
            if found is None:
                found = self._found[name] = Future()
        if is_first:
            try:
                found.set_result(self.file.copied(name))
            except BaseException as error:
                found.set_exception(error)
        return found.result()

    def close(self) -> None:
        """Read no further, and close the file."""
        self._is_over = True
        self._thread.join()
        self.file.close()

    def _read(self) -> None:
        for name in self.file.places:
            if self._is_over:
                return
            # The caller that takes the tensor gets the error.
            with suppress(OSError, DamagedPackedFileError):
                self.copied(name)


class _Ahead:
    """What is read ahead in this process: at most one file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._most_bytes = 0
        self._reader: PackedReader | None = None

    def expect(self, most_bytes: int) -> None:
        """Let the next file that begins be read ahead, if it has at most so many bytes."""
        self._most_bytes = most_bytes

    def begin(self, folder: Path) -> None:
        """Begin to read the packed weights in a folder, if there are any and they are expected."""
        try:
            file = PackedFile(folder / WEIGHTS_FILE, None)
        except (OSError, DamagedPackedFileError) as error:
            _logger.debug("packed weights are not read ahead", exc_info=error)
            return
        with self._lock:
            if file.size <= self._most_bytes:
                self._reader = PackedReader(file)
                return
        file.close()

    def take(self, file: PackedFile | None) -> PackedReader | None:
        """The reader of a file, if that was begun, to be closed by the caller; what else was begun is dropped."""
        with self._lock:
            reader, self._reader, self._most_bytes = self._reader, None, 0
        if reader is None or (file is not None and reader.file.is_same_as(file)):
            return reader
        reader.close()
        return None


PACKED_AHEAD = _Ahead()
