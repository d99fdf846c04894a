"""A run's folder: its settings, and a line per result, so that a killed run can continue."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hetero_kv.durable_file import PARTIAL, sync_folder, write_atomically
from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.evals.checked_lines import parsed, with_checksum, without_checksum
from hetero_kv.evals.outcome import Result
from hetero_kv.printing import escaped

SETTINGS, RESULTS = "run.json", "results.jsonl"

# The most bytes of a run's file: a hundred thousand long lines.
_MOST_BYTES = 1 << 30


class RunFolder:
    """The folder of a run in progress; `opened` makes one.

    Attributes:
        results: in writing order, including those of earlier starts.
    """

    def __init__(self, path: Path, results: list[Result], file: FileIO) -> None:
        self.path = path
        self.results = results
        self._file = file

    @classmethod
    @contextmanager
    def opened(cls, path: Path, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> Iterator[RunFolder]:
        """Open the folder `path` for a run with `settings`: a new run, or the same run, which then continues.

        An unfinished last line of a killed run is dropped; its sample runs again.

        Args:
            settings: everything that the results depend on, as plain data.
            environment: versions and the like, kept from the first start.

        Raises:
            HeteroKVError: the folder has a run with other settings (the differences are named), is in use, cannot be
                written, or has a broken line.
        """
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path / ".lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise HeteroKVError(
                    f"out {str(path)!r}: another run is writing to it; wait for it, or give another"
                ) from None
        try:
            with writing(path):
                _settle(path, settings, environment)
                _drop_unfinished_line(path / RESULTS)
            known = read_results(path)
            with writing(path):
                # Unbuffered: closing the file must not retry a failed write.
                file = open(path / RESULTS, "ab", buffering=0)  # noqa: SIM115
            with file:
                with writing(path):
                    sync_folder(path)
                yield cls(path, known, file)
        finally:
            lock.release()

    def append(self, result: Result) -> None:
        """Write a line and wait until it is on the disk, so that it survives a kill and a power cut.

        Raises HeteroKVError if it cannot be written, as on a full disk; earlier lines are kept.
        """
        line = with_checksum(as_utf8(result.to_json()).decode()).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        with writing(self.path):
            try:
                while line:
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):
                    self._file.truncate(before)
                raise
        self.results.append(result)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this context an OSError becomes a HeteroKVError that says how the run in `path` can continue."""
    try:
        yield
    except OSError as error:
        remedy = "give another folder with --out"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "the results so far are kept: free some space, and the same command goes on"
        place = f"{error.filename!r}: " if isinstance(error.filename, str) else ""
        reason = place + (error.strerror or str(error))
        raise HeteroKVError(f"out {str(path)!r} cannot be written: {reason}; {remedy}") from error


def as_utf8(text: str) -> bytes:
    """The text in UTF-8, with lone surrogates in JSON's escaped form."""
    return text.encode("utf-8", errors="backslashreplace")


def read_settings(path: Path) -> dict[str, Any]:
    """The content of `run.json` of the run at `path`: `settings`, `environment`, and whether lines have checksums.

    Raises HeteroKVError if there is no run, or the file is not one that this program wrote.
    """
    try:
        content = parsed(_content(path / SETTINGS))
        _require_run(content)
    except FileNotFoundError:
        raise HeteroKVError(f"{str(path)!r} holds no run: there is no {SETTINGS}; give the --out of a run") from None
    except (OSError, ValueError) as error:
        raise HeteroKVError(
            f"{str(path / SETTINGS)!r} cannot be read: {_reason(error)}; restore the file that the run wrote, or "
            "start again in another folder"
        ) from error
    return content


def _require_run(content: Any) -> None:
    """Raise ValueError if `content` is not that of a `run.json`."""
    for where, fields in _FIELDS.items():
        part = content.get(where) if isinstance(content, dict) and where else content
        if not isinstance(part, dict):
            raise ValueError(f"it has no {where or SETTINGS}")
        for name, kinds in fields.items():
            # Folders from before checksums lack that field; all other fields are always written.
            if where and name not in part:
                raise ValueError(f"{where}.{name} is missing")
            if not isinstance(part.get(name), kinds):
                raise ValueError(f"{where}.{name} is {shown(part.get(name), 100)}".lstrip("."))
    for name, method in content["settings"]["methods"].items():
        if not isinstance(method, dict):
            raise ValueError(f"settings.methods.{shown(name, 100)} is {shown(method, 100)}")


_FIELDS: dict[str, dict[str, Any]] = {
    "": {"settings": dict, "environment": dict, "line_checksums": bool | None},
    "settings": {"methods": dict, "baseline": str | None},
    "environment": {"python": str, "versions": dict, "system": str, "processor": str, "cpus": int | None},
}


def read_results(path: Path) -> list[Result]:
    """The results of the run at `path`; empty without a results file.

    Raises HeteroKVError, naming the line, for a line that is not a result, was changed after it was written, or appears
    twice. Lines of folders from before checksums need none.
    """
    results = path / RESULTS
    if not os.path.lexists(results):
        return []
    is_required = bool(read_settings(path).get("line_checksums"))
    try:
        text = _content(results).decode()
    except (OSError, ValueError) as error:
        raise HeteroKVError(f"{str(results)!r} cannot be read: {_reason(error)}; give another folder") from error
    found: dict[tuple[str, str | None], tuple[int, Result]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line:
            continue
        try:
            result = Result.from_json(without_checksum(line, is_required=is_required))
            earlier, _ = found.setdefault((result.sample, result.method), (number, result))
            if earlier != number:
                raise ValueError(f"line {earlier} has this sample and method already")
        except (ValueError, TypeError, KeyError) as error:
            raise HeteroKVError(
                f"{str(results)!r}: line {number} is no result ({error}); take it out, and its sample is run again"
            ) from error
    return [result for _, result in found.values()]


def _reason(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _content(path: Path) -> bytes:
    """The content of a file. Raises OSError, also if it is not a regular file or exceeds the size of any run's."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    if status.st_size > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, and {_MOST_BYTES:,} are the most", str(path))
    return path.read_bytes()


def differences(there: Any, now: Any, where: str = "") -> Iterator[str]:
    """The differences of two pieces of plain data: "methods.quest.engine.chunk_size is 512 there and 4096 now"."""
    if isinstance(there, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*there, *now)):
            inner = f"{where}.{key}" if where else str(key)
            if key not in there or key not in now:
                yield f"{inner} is only {'there' if key in there else 'here'}"
            else:
                yield from differences(there[key], now[key], inner)
    elif isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        for index, pair in enumerate(zip(there, now, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif there != now:
        yield f"{where} is {there!r} there and {now!r} now"


def _settle(path: Path, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """Write `run.json`, or check that the existing one has the same settings."""
    for abandoned in (*path.glob(f"*{PARTIAL}"), *path.glob(f"*/*{PARTIAL}")):
        abandoned.unlink()
    # Convert as JSON does: tuples become lists, keys become texts.
    plain_settings = json.loads(json.dumps(settings))
    if os.path.lexists(path / SETTINGS):
        found = list(differences(read_settings(path)["settings"], plain_settings))
        if found:
            more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
            raise HeteroKVError(
                f"out {str(path)!r} holds a run with other settings: {'; '.join(found[:3])}{more}; give another "
                "folder, or the same settings to go on with that run"
            )
        return
    if os.path.lexists(path / RESULTS):
        raise HeteroKVError(f"out {str(path)!r} has a {RESULTS} but no {SETTINGS}; give another folder")
    content = {"settings": plain_settings, "environment": dict(environment), "line_checksums": True}
    write_atomically(path / SETTINGS, as_utf8(escaped(json.dumps(content, indent=2, ensure_ascii=False)) + "\n"))


def _drop_unfinished_line(path: Path) -> None:
    if not os.path.lexists(path):
        return
    content = _content(path)
    os.truncate(path, content.rfind(b"\n") + 1)
