"""Uploaded documents: their texts, in a folder, each for the key that uploaded it."""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero_kv.documents.reading import document_from
from hetero_kv.durable_file import write_atomically
from hetero_kv.server.errors import ApiError
from hetero_kv.server.keys import owner_of

_logger = logging.getLogger(__name__)
_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True)
class StoredFile:
    """An uploaded document.

    Attributes:
        id: its name in requests, which nobody can guess.
        filename: as the client named it, without folders.
        bytes: size of the upload.
        text_bytes: size of its text in UTF-8.
        owner: hash of the name of the API key that uploaded it.
        purpose: as the client gave it.
        created_at: seconds since 1970.
    """

    id: str
    filename: str
    bytes: int
    text_bytes: int
    owner: str
    purpose: str
    created_at: int

    def form(self) -> dict[str, object]:
        """The file as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class Files:
    """The documents in a folder; two files each: its metadata, and the text.

    Args:
        folder: made when the first document comes.
        limit: bytes of all texts; an upload beyond is refused.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._changing = threading.Lock()

    def add(self, content: bytes, filename: str, purpose: str, key: str) -> StoredFile:
        """Keep the text of an upload: plain text, PDF, DOCX or HTML.

        Raises ConfigError if it has no text, ApiError 507 where the folder or its disk is full.
        """
        name = Path(filename.replace("\\", "/")).name[:200] or "document"
        text = document_from(content, name).text.encode()
        stored = StoredFile(
            f"file-{secrets.token_hex(16)}", name, len(content), len(text), owner_of(key), purpose, int(time.time())
        )
        with self._changing:
            used = sum(each.text_bytes for each in self._all())
            if used + len(text) > self._limit:
                raise ApiError(
                    507, f"uploaded documents take {used:,} of {self._limit:,} bytes, and this one's text has "
                    f"{len(text):,}; delete some, or start the server with a larger --file_gb", code="files_full",
                )  # fmt: skip
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomically(self._folder / f"{stored.id}.txt", text)
                write_atomically(self._folder / f"{stored.id}.json", json.dumps(asdict(stored)).encode())
            except OSError as error:
                self._remove(stored.id)
                _logger.warning("an upload cannot be stored in %s: %s", self._folder, error)
                # Without the server's paths.
                raise ApiError(
                    507, f"the document cannot be stored ({error.strerror}); free disk space at the server's "
                    "--file_folder, or choose another folder", code="files_full",
                ) from error  # fmt: skip
        return stored

    def get(self, file_id: str, key: str) -> StoredFile:
        """A document of this key. Raises ApiError 404 for others' and unknown ones alike."""
        path = self._folder / f"{file_id}.json"
        found = self._read(path) if _ID.fullmatch(file_id) and path.is_file() else None
        if found is None or found.owner != owner_of(key):
            raise ApiError(404, f"there is no file {file_id!r}; upload it by POST /v1/files", param="file_id")
        return found

    def text(self, file_id: str, key: str) -> str:
        """The text of a document of this key. Raises ApiError 404 as `get`."""
        stored = self.get(file_id, key)
        return (self._folder / f"{stored.id}.txt").read_text(encoding="utf-8")

    def all(self, key: str) -> list[StoredFile]:
        """The documents of this key, the newest first."""
        own = [each for each in self._all() if each.owner == owner_of(key)]
        return sorted(own, key=lambda each: each.created_at, reverse=True)

    def delete(self, file_id: str, key: str) -> None:
        """Remove a document of this key. Raises ApiError 404 as `get`."""
        self._remove(self.get(file_id, key).id)

    def _remove(self, file_id: str) -> None:
        for suffix in ("json", "txt"):
            with suppress(FileNotFoundError, NotADirectoryError):
                (self._folder / f"{file_id}.{suffix}").unlink()

    def _all(self) -> list[StoredFile]:
        paths = self._folder.glob("file-*.json") if self._folder.is_dir() else ()
        # The newest first, also of those of one second.
        return [found for path in sorted(paths, key=_written, reverse=True) if (found := self._read(path)) is not None]

    def _read(self, path: Path) -> StoredFile | None:
        try:
            return StoredFile(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            # Another program's file, or one that is removed just now.
            return None


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
