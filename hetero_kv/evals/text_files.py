"""Reads text files, plain or gzipped, up to the largest text that a run can use."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.text_decoding import decoded, is_wide

# A million tokens take some five million characters, or twice as many if all are escaped.
LONGEST_LINE = 32 << 20
# A run keeps all samples in memory; the benchmarks' largest files have some 500 MB.
MOST_BYTES = 2 << 30
_AT_ONCE = 1 << 20


def lines_of(path: Path, what: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1.

    Args:
        what: the file's use, for errors ("data file").

    Raises:
        HeteroKVError: a file that cannot be read, or exceeds the limits, packed or unpacked.
    """
    left, number = MOST_BYTES, 0
    with _opened(path, what) as file:
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if number == 1 and is_wide(line):
                raise HeteroKVError(f"{what} {path}: it is UTF-16 or UTF-32 text; convert it to UTF-8")
            left -= len(line)
            if len(line) > LONGEST_LINE:
                raise HeteroKVError(
                    f"{what} {path}: line {number} has more than {LONGEST_LINE >> 20} MiB; no prompt is as long"
                )
            if left < 0:
                raise _too_large(path, what)
            yield number, line


def text_of(path: Path, what: str) -> str:
    """All text of a file. Raises HeteroKVError like `lines_of`, and if it is not text (`text_decoding`)."""
    pieces, size = [], 0
    with _opened(path, what) as file:
        while piece := file.read(_AT_ONCE):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                raise _too_large(path, what)
    return decoded(b"".join(pieces), f"{what} {path}")


@contextmanager
def _opened(path: Path, what: str) -> Iterator[IO[bytes]]:
    opening: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opening(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise HeteroKVError(f"{what} {path}: cannot be read: {error}") from error


def require_kept(path: Path, what: str) -> None:
    """Raise HeteroKVError for a pipe, a device or a socket: a run reads its files more than once."""
    try:
        mode = path.stat().st_mode
    except OSError:  # opening the file reports it
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise HeteroKVError(
            f"{what} {path}: it is no file but a pipe or a device, which cannot be read twice; save it in a file first"
        )


def _too_large(path: Path, what: str) -> HeteroKVError:
    return HeteroKVError(f"{what} {path}: it has more than {MOST_BYTES >> 20:,} MiB of text; cut it into several files")
