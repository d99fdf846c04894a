"""Objects under an fsspec address (S3, GCS, a mounted folder): each is written once, as a whole."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import ConfigError, brief_error

_logger = logging.getLogger(__name__)
T = TypeVar("T")
S = TypeVar("S")

#: A marker object at every address with contexts: a folder without it is a disk that is not mounted.
MARKER = "hetero-kv-contexts.txt"
_MARKER_TEXT = b"Contexts saved by hetero-kv. Without this file their folder counts as not mounted.\n"
#: The folder of incomplete objects, on media that would list them.
PARTIAL = "partial"
# Protocols under which an object appears whole or not at all.
_WRITES_WHOLE = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "ocilake", "tos", "tosfs", "hf", "memory")
)
# Names of an object's time of change in fsspec's details.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
# Pauses before a failed address is tried again, seconds: the first, and the longest.
_PAUSES_S = (1.0, 30.0)
_AT_ONCE = 8
_TRIES = 5


class UnreachableError(ContextError):
    """An address with contexts does not answer, or not in time."""


class ObjectInfo(NamedTuple):
    """An object in a listing: its bytes, and when it was written (seconds since 1970; None if unknown)."""

    size: int
    modified: float | None


class _Outage:
    """The pause before calls of a kind are tried again at an address where they failed.

    Args:
        fault, remedied: the state of the address in messages, during the failure and after it.
        meanwhile: what messages promise until then.
    """

    def __init__(self, address: str, fault: str, remedied: str, meanwhile: str) -> None:
        self._address, self._fault, self._remedied, self._meanwhile = address, fault, remedied, meanwhile
        self._lock = threading.Lock()
        self._pause, self._until, self._reason = 0.0, 0.0, ""

    @property
    def left_s(self) -> float:
        """Seconds until the next try; 0 if it is due."""
        return max(0.0, self._until - time.monotonic())

    def begin(self, error: BaseException) -> None:
        """Record a failed call."""
        with self._lock:
            if not self.left_s:
                first, longest = _PAUSES_S
                if not self._pause:
                    _logger.warning(
                        "%s %s (%s); %s, and it is tried again",
                        self._address, self._fault, brief_error(error), self._meanwhile,
                    )  # fmt: skip
                self._pause = min(longest, 2 * self._pause or first)
                self._until = time.monotonic() + self._pause
                self._reason = brief_error(error)

    def end(self) -> None:
        """Record a successful call."""
        if self._pause:
            with self._lock:
                self._pause, self._until = 0.0, 0.0
            _logger.warning("%s %s", self._address, self._remedied)

    def error(self) -> UnreachableError:
        """The error that calls raise meanwhile."""
        return UnreachableError(f"{self._address} {self._fault} ({self._reason}); check it (context_folder)")


class Medium:
    """The objects under an address. If it does not answer, calls fail at once until it is tried again.

    An address that only refuses writes, because it is full, is still read.

    Args:
        address: for fsspec, such as "s3://bucket/contexts".
        seconds: how long a call may take.

    Attributes:
        address: as messages show it, without a password.
        failures: how often it did not answer.

    Raises ConfigError for a protocol that fsspec does not know, or whose package is missing.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self.address, self._seconds = without_password(address), seconds
        self._files, self._root = _file_system(address)
        protocol = self._files.protocol
        self._writes_whole = not _WRITES_WHOLE.isdisjoint([protocol] if isinstance(protocol, str) else protocol)
        self.failures = 0
        # Whether the marker was ever seen.
        self._is_known = False
        self._counting = threading.Lock()
        self._away = _Outage(self.address, "is not reachable", "is reachable again", "requests go on without it")
        self._unwritable = _Outage(
            self.address, "cannot be written", "can be written again", "contexts wait on this machine's disk"
        )

    @property
    def away_s(self) -> float:
        """Seconds until it is tried again; 0 if it can be read and written."""
        return max(self._away.left_s, self._unwritable.left_s)

    # -- calls

    def require_there(self) -> None:
        """Raise UnreachableError unless the address answers and has its marker, which the first call ever writes."""
        self._bounded(self._require_marker)

    def _require_marker(self) -> None:
        try:
            self._files.info(self._path(MARKER))
        except FileNotFoundError:
            if self._is_known:
                raise OSError(f"there is no {MARKER} any more; mount the folder, or restart to begin anew") from None
            self._put(MARKER, _MARKER_TEXT)
        self._is_known = True

    def names(self, folder: str) -> dict[str, ObjectInfo]:
        """The objects and folders in a folder. Raises UnreachableError."""
        return self._bounded(lambda: self._listed(folder))

    def _listed(self, folder: str) -> dict[str, ObjectInfo]:
        path = self._path(folder)
        for _ in range(_TRIES):
            self._files.invalidate_cache(path)
            try:
                found = self._files.ls(path, detail=True)
                break
            except FileNotFoundError:
                # The folder, or an object that was removed meanwhile.
                if not self._files.isdir(path):
                    found = []
                    break
        else:
            raise OSError(f"{folder} changes while it is listed")
        if not found:
            self._require_marker()
        return {each["name"].rstrip("/").rpartition("/")[2]: _info(each) for each in found}

    def info(self, name: str) -> ObjectInfo | None:
        """An object's entry in its listing; None if there is none. Raises UnreachableError."""
        self._files.invalidate_cache(self._path(name).rpartition("/")[0])
        with suppress(FileNotFoundError):
            return _info(self._bounded(lambda: self._files.info(self._path(name)), may_lack=True))
        return None

    def read(self, name: str) -> bytes:
        """An object's content. Raises FileNotFoundError, and UnreachableError."""
        return self._bounded(lambda: self._files.cat_file(self._path(name)), may_lack=True)

    def write(self, name: str, content: bytes) -> None:
        """Write an object atomically: a reader never sees a part. Raises UnreachableError."""
        self._bounded(lambda: self._put(name, content), writes=True)

    def _put(self, name: str, content: bytes) -> None:
        path = self._path(name)
        if self._writes_whole:
            self._files.pipe_file(path, content)
            return
        partial = self._path(f"{PARTIAL}/{secrets.token_hex(16)}")
        for each in (partial, path):
            self._files.makedirs(each.rpartition("/")[0], exist_ok=True)
        try:
            self._files.pipe_file(partial, content)
            self._files.mv(partial, path)
        except BaseException:
            with suppress(Exception):
                self._files.rm_file(partial)
            raise

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are no error. Raises UnreachableError."""

        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                self._bounded(lambda: self._files.rm_file(self._path(name)), may_lack=True, writes=True)

        at_once(remove, names)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # -- being away

    def _bounded(self, call: Callable[[], T], *, may_lack: bool = False, writes: bool = False) -> T:
        """The result of a call, made in a thread that is abandoned if the medium hangs.

        may_lack: whether FileNotFoundError means a missing object, and not a failure.
        """
        absence = self._unwritable if writes else self._away
        for each in (self._away, absence):
            if each.left_s:
                raise each.error()
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="hetero-kv medium", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if results:
            absence.end()
            return results[0]
        error = errors[0] if errors else TimeoutError(f"no answer within {self._seconds:g} s")
        if may_lack and isinstance(error, FileNotFoundError):
            absence.end()
            raise error
        with self._counting:
            self.failures += 1
        absence.begin(error)
        raise absence.error() from error


def at_once(work: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """The results of `work` for all items, several at a time. Raises the first error; items after it are skipped."""
    with ThreadPoolExecutor(_AT_ONCE, "hetero-kv objects") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def without_password(address: str) -> str:
    """An address as logs and errors show it: user:password@ is user:***@."""
    return re.sub(r"(://[^/:@]*):[^/]*@", r"\1:***@", address)


def _file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it."""
    shown = without_password(address)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigError(
            f"context_folder {shown} is an address, for which fsspec is missing; pip install 'hetero-kv[cluster]', "
            "or name a folder"
        ) from error
    try:
        files, root = url_to_fs(address)
    except ImportError as error:
        raise ConfigError(
            f"context_folder {shown} needs a package that is missing: {brief_error(error)}; or name a folder"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"context_folder {shown} is no address for fsspec ({brief_error(error)}); give one such as "
            "s3://bucket/contexts or file:///mnt/contexts, or a folder"
        ) from error
    return files, root.rstrip("/")


def _info(details: dict[str, Any]) -> ObjectInfo:
    found = next((details[name] for name in _TIMES if details.get(name) is not None), None)
    with suppress(ValueError):
        found = datetime.fromisoformat(found) if isinstance(found, str) else found
    modified = found.timestamp() if isinstance(found, datetime) else found
    return ObjectInfo(int(details.get("size") or 0), float(modified) if isinstance(modified, int | float) else None)
