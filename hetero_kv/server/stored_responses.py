"""Responses that later requests continue (`previous_response_id`), in a folder, each for its request's key."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

from hetero_kv.durable_file import write_atomically
from hetero_kv.server.errors import ApiError
from hetero_kv.server.keys import owner_of

_ID = re.compile(r"resp_[0-9a-f]{32}")


class StoredResponses:
    """Conversations and responses by id.

    Args:
        folder: created with the first response.
        max_kept: how many are kept; the oldest are removed first.
        limit: bytes of all of them.
    """

    def __init__(self, folder: Path, max_kept: int, limit: int) -> None:
        self._folder, self._max_kept, self._limit = folder, max_kept, limit
        self._changing = threading.Lock()

    def put(self, response: dict[str, Any], items: list[Any], key: str) -> None:
        """Keep a response and the items of its conversation, its output included."""
        content = {"owner": owner_of(key), "response": response, "items": items}
        with self._changing:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            text = json.dumps(content, ensure_ascii=True)
            write_atomically(self._path(response["id"]), text)
            paths = sorted(self._folder.glob("resp_*.json"), key=_age)
            sizes = [_size(path) for path in paths]
            # The newest that fit.
            while paths and (len(paths) > self._max_kept or sum(sizes) > self._limit):
                paths.pop(0).unlink(missing_ok=True)
                sizes.pop(0)

    def get(self, response_id: str, key: str) -> tuple[dict[str, Any], list[Any]]:
        """A response of this key, and the items of its conversation.

        Raises ApiError 404 for unknown ones and those of other keys alike.
        """
        try:
            found = (
                json.loads(self._path(response_id).read_text(encoding="utf-8")) if _ID.fullmatch(response_id) else {}
            )
        except (OSError, ValueError):
            found = {}
        if found.get("owner") != owner_of(key):
            raise ApiError(
                404, f"there is no response {response_id!r}; the server keeps the last {self._max_kept:,}, unless "
                "store is false", param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        return found["response"], found["items"]

    def delete(self, response_id: str, key: str) -> None:
        """Remove a response of this key. Raises ApiError 404 as `get`."""
        self.get(response_id, key)
        self._path(response_id).unlink(missing_ok=True)

    def _path(self, response_id: str) -> Path:
        return self._folder / f"{response_id}.json"


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
