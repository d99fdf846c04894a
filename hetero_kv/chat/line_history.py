"""The entries of earlier chats, in a file in the settings file's folder: a JSON string per line, the latest last."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import History

from hetero_kv.chat.pastes import Pastes
from hetero_kv.durable_file import PARTIAL, move_durably

#: The most bytes of a stored entry; longer ones are kept until the chat ends.
MOST_OF_ENTRY = 64 << 10
#: The most bytes of the file; beyond it, the older half is dropped.
MOST_OF_FILE = 1 << 20

_logger = logging.getLogger(__name__)


class LineHistory(History):
    """The history of the input line, across chats.

    Args:
        path: the file; None to keep entries until the chat ends. One warning is logged if it cannot be read or written.
        pastes: folds long entries on the line; the file stores them unfolded.
    """

    def __init__(self, path: Path | None, pastes: Pastes) -> None:
        super().__init__()
        self._path = path
        self._pastes = pastes

    def load_history_strings(self) -> Iterable[str]:
        """The entries, the latest first."""
        if self._path is None:
            return
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
            if sum(map(len, lines)) > MOST_OF_FILE:
                lines = self._shortened(self._path, lines)
        except FileNotFoundError:
            return
        except OSError as error:
            self._give_up(error)
            return
        for line in reversed(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # a truncated or edited line
            if isinstance(entry, str):
                yield self._pastes.folded(entry)

    def store_string(self, string: str) -> None:
        """Add an entry to the file."""
        line = json.dumps(self._pastes.unfolded(string)).encode() + b"\n"
        if self._path is None or len(line) > MOST_OF_ENTRY:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(self._path, line, os.O_APPEND)
        except OSError as error:
            self._give_up(error)

    def _shortened(self, path: Path, lines: list[bytes]) -> list[bytes]:
        size, kept = 0, len(lines)
        while kept and size + len(lines[kept - 1]) <= MOST_OF_FILE // 2:
            kept -= 1
            size += len(lines[kept])
        partial = path.with_name(path.name + PARTIAL)
        _write(partial, b"".join(lines[kept:]), os.O_TRUNC)
        move_durably(partial, path)
        return lines[kept:]

    def _give_up(self, error: OSError) -> None:
        _logger.warning("%s: %s; the history lasts only until the chat ends", self._path, error.strerror)
        self._path = None


def _write(path: Path, content: bytes, flag: int) -> None:
    # Questions are private to the user.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
