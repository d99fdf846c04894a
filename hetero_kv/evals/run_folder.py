"""A run's folder: what was asked for, and a line per result, so that a killed run goes on where it was."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.outcome import Result

SETTINGS, RESULTS = "run.json", "results.jsonl"


class RunFolder:
    """The folder of a run that is going on; `opened` makes one.

    Attributes:
        results: in the order in which they were written, those of earlier starts first.
    """

    def __init__(self, path: Path, results: list[Result], file: BinaryIO) -> None:
        self.path = path
        self.results = results
        self._file = file

    @classmethod
    @contextmanager
    def opened(cls, path: Path, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> Iterator[RunFolder]:
        """The folder at `path` for a run with `settings`: a new one, or the same run's, which then goes on.

        A last line that a killed run left unfinished is dropped; its sample is run again.

        Args:
            settings: everything that the results depend on; plain data.
            environment: versions and the like, kept as they were at the first start.

        Raises:
            HeteroKVError: the folder holds a run with other settings (the differences are named), is in use, cannot
                be written, or has a broken line.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path / ".lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise HeteroKVError(
                f"out {str(path)!r}: another run is writing to it; wait for it, or give another"
            ) from None
        except OSError as error:
            raise HeteroKVError(f"out {str(path)!r} cannot be written: {error.strerror or error}") from error
        try:
            _settle(path, settings, environment)
            results = path / RESULTS
            _drop_unfinished_line(results)
            known = read_results(results)
            with open(results, "ab") as file:
                yield cls(path, known, file)
        finally:
            lock.release()

    def append(self, result: Result) -> None:
        """Write a line and wait until it is on the disk: what was appended survives a kill and a power cut."""
        self._file.write(result.to_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.results.append(result)


def read_settings(path: Path) -> dict[str, Any]:
    """What `run.json` of the run at `path` says: `settings` and `environment`.

    Raises HeteroKVError where there is no run.
    """
    try:
        return json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeteroKVError(f"{str(path)!r} holds no run: there is no {SETTINGS}; give the --out of a run") from None
    except (OSError, ValueError) as error:
        raise HeteroKVError(f"{str(path / SETTINGS)!r} cannot be read: {error}") from error


def read_results(path: Path) -> list[Result]:
    """The results in the file at `path`; none when there is no file.

    Raises HeteroKVError for a line that is no result; it names the line.
    """
    if not path.exists():
        return []
    results = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            results.append(Result.from_json(line))
        except (ValueError, TypeError, KeyError) as error:
            raise HeteroKVError(
                f"{str(path)!r}: line {number} is no result ({error}); take it out, and its sample is run again"
            ) from error
    return results


def write_atomically(path: Path, text: str) -> None:
    """Write a file that appears complete or not at all."""
    descriptor, partial = tempfile.mkstemp(prefix=path.name, suffix=".partial", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def differences(there: Any, now: Any, where: str = "") -> Iterator[str]:
    """Where two pieces of plain data differ, in words: "methods.quest.engine.chunk_size is 512 there and 4096 now"."""
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
    """Write `run.json`, or see to it that the one there is the same run's."""
    for abandoned in path.glob("*.partial"):
        abandoned.unlink()
    # As JSON has it: tuples are lists, keys are texts.
    asked = json.loads(json.dumps(settings))
    if (path / SETTINGS).exists():
        found = list(differences(read_settings(path)["settings"], asked))
        if found:
            more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
            raise HeteroKVError(
                f"out {str(path)!r} holds a run with other settings: {'; '.join(found[:3])}{more}; give another "
                "folder, or the same settings to go on with that run"
            )
        return
    if (path / RESULTS).exists():
        raise HeteroKVError(f"out {str(path)!r} has a {RESULTS} but no {SETTINGS}; give another folder")
    content = {"settings": asked, "environment": dict(environment)}
    write_atomically(path / SETTINGS, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _drop_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
