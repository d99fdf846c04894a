"""Public data files as they are published: JSON lines, gzipped or not, of any registered format."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.formats.format import BrokenLine, Line, formats
from hetero_kv.evals.sample import Sample


@dataclass(frozen=True)
class DataFile:
    """What a data file holds.

    Attributes:
        path: of the file.
        samples: one per usable line, in order.
        skipped: the other lines: their number, from 1, and why they are of no use. Empty lines are not counted.
    """

    path: Path
    samples: list[Sample] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)


def read_data_file(path: str | Path) -> DataFile:
    """The samples of a data file; the format is recognised from each line's fields.

    Raises:
        HeteroKVError: a file that cannot be read, or without a single usable line.
    """
    path = Path(path)
    data_file = DataFile(path)
    for number, line in _lines(path):
        try:
            data_file.samples.append(_sample(line, path, number))
        except BrokenLine as error:
            data_file.skipped.append((number, str(error)))
    if not data_file.samples:
        number, reason = data_file.skipped[0] if data_file.skipped else (1, "the file is empty")
        raise HeteroKVError(f"data file {path}: no line can be used; line {number}: {reason}")
    return data_file


def _sample(line: str, path: Path, number: int) -> Sample:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BrokenLine(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BrokenLine(f"not a JSON object but {type(record).__name__}")
    known = next((one for one in formats() if one.recognises(record)), None)
    if known is None:
        fields = ", ".join(sorted(record)) or "none"
        raise BrokenLine(
            f"fields {fields} are of no known format; known: {'; '.join(one.meaning for one in formats())}"
        )
    return known.sample(Line(record, path, number))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.decode("utf-8", errors="backslashreplace")
    except (OSError, EOFError, zlib.error) as error:
        raise HeteroKVError(f"data file {path}: cannot be read: {error}") from error
