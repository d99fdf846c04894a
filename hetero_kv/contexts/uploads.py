"""Uploads of contexts in the background: a thread copies them from the disk cache to a medium."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero_kv.contexts.chunks import BLOCKS_FOLDER, chunk_name
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.medium import Medium, UnreachableError, at_once
from hetero_kv.durable_file import write_atomically
from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.errors import brief_error

_logger = logging.getLogger(__name__)
#: Seconds for which an object that no context needs is kept: its card may not be written yet.
GRACE_S = 600.0
# An upload must end before its chunks reach that age.
_YOUNG_S = GRACE_S / 2


@dataclass(frozen=True)
class Upload:
    """A context to be uploaded.

    Attributes:
        card: the path of the context's own object; its file in the disk cache has the last part as its name.
        chunks: the files of its blocks.
        replaces: paths of contexts' objects that are removed once this one is uploaded.
    """

    card: str
    chunks: tuple[str, ...]
    replaces: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of the context's own file."""
        return self.card.rpartition("/")[2]


class Uploads:
    """Pending uploads, recorded in a folder, so that another process continues them after this one's end.

    Args:
        folder: the disk cache.
        uploaded: called after every upload, in its thread.
    """

    def __init__(self, medium: Medium, folder: Path, uploaded: Callable[[], None]) -> None:
        self._medium, self._folder, self._uploaded = medium, folder, uploaded
        self._notes = folder / "pending"
        self._notes.mkdir(exist_ok=True)
        self._starting = threading.Lock()
        # Set when there may be uploads.
        self._news = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if self.pending():
            self._wake()

    def pending(self) -> list[Upload]:
        """The pending uploads of all processes that share the disk cache, the oldest first."""
        found = []
        for path in self._notes.glob("*.json"):
            try:
                note = json.loads(path.read_text(encoding="utf-8"))
                upload = Upload(note["card"], tuple(note["chunks"]), tuple(note["replaces"]))
                found.append((path.stat().st_mtime, upload))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                _logger.warning("%s is no upload (%s), and is removed", path, brief_error(error))
                path.unlink(missing_ok=True)
        return [upload for _, upload in sorted(found, key=lambda each: each[0])]

    def has(self, file: str) -> bool:
        """Whether the context of this file is not uploaded yet."""
        return self._note(file).exists()

    def files(self) -> set[str]:
        """The files that must stay in the disk cache."""
        return {file for upload in self.pending() for file in (upload.file, *upload.chunks)}

    def beyond(self, limit: int) -> list[Upload]:
        """The uploads whose files exceed `limit` bytes together with those of all newer ones, except the newest."""
        found, total, counted = [], 0, set[str]()
        for number, upload in enumerate(reversed(self.pending())):
            for file in {upload.file, *upload.chunks} - counted:
                counted.add(file)
                with suppress(FileNotFoundError):
                    total += (self._folder / file).stat().st_size
            if number and total > limit:
                found.append(upload)
        return found

    def add(self, upload: Upload) -> None:
        """Upload a context whose files are in the disk cache. Raises OSError."""
        write_atomically(self._note(upload.file), json.dumps(asdict(upload)))
        self._wake()

    def drop(self, file: str) -> None:
        """Cancel the upload of the context of this file."""
        self._note(file).unlink(missing_ok=True)

    def _note(self, file: str) -> Path:
        return self._notes / f"{file}.json"

    def _wake(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hetero-kv uploads", daemon=True)
                self._thread.start()
        self._news.set()

    def _run(self) -> None:
        given_up: set[str] = set()
        while True:
            self._news.clear()
            pending = [upload for upload in self.pending() if upload.file not in given_up]
            away_s = self._medium.away_s
            if self._is_closed and (not pending or away_s):
                return
            if not pending or away_s:
                self._news.wait(away_s or None)
                continue
            for upload in pending:
                try:
                    self._write(upload)
                    self.drop(upload.file)
                    self._uploaded()
                except UnreachableError:
                    # It stays recorded, and is tried again.
                    break
                except (FileNotFoundError, DamagedContextError):
                    _logger.warning("a context is not uploaded: its files in %s are gone or damaged", self._folder)
                    self.drop(upload.file)
                except Exception as error:
                    _logger.warning("a context is not uploaded to %s (%s)", self._medium.address, brief_error(error))
                    given_up.add(upload.file)

    def _write(self, upload: Upload) -> None:
        self._medium.require_there()
        # Without the card its chunks are not needed.
        self._own_content(upload)
        began = 0.0
        while not began or time.monotonic() - began > _YOUNG_S:
            began = time.monotonic()
            at_once(self._write_chunk, upload.chunks)
        self._medium.write(upload.card, self._own_content(upload))
        self._medium.remove(upload.replaces)

    def _own_content(self, upload: Upload) -> bytes:
        """The content of a context's own file. Raises FileNotFoundError, and ContextError for an unusable one."""
        path = self._folder / upload.file
        content = path.read_bytes()
        OpenContext.at(path).close()
        return content

    def _write_chunk(self, name: str) -> None:
        """Write a chunk unless it is there and young enough not to be removed before its card is written."""
        there = self._medium.info(f"{BLOCKS_FOLDER}/{name}")
        if there is None or there.modified is None or time.time() - there.modified > _YOUNG_S:
            content = (self._folder / name).read_bytes()
            if chunk_name(content) != name:
                raise DamagedContextError(f"{self._folder / name} is damaged")
            self._medium.write(f"{BLOCKS_FOLDER}/{name}", content)

    def close(self, seconds: float) -> None:
        """Wait until all is uploaded, the medium fails, or the time is over; the rest stays recorded."""
        self._is_closed = True
        self._news.set()
        if self._thread is not None:
            self._thread.join(seconds)
