"""Reads public data files as published: JSON lines of any registered format, also gzipped."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hetero_kv.errors import HeteroKVError, shortened
from hetero_kv.evals.checked_lines import parsed
from hetero_kv.evals.formats.format import BrokenLine, Line, formats
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.text_files import lines_of

MOST_SKIPPED = 10_000

_LONGEST_REASON = 500


@dataclass(frozen=True)
class DataFile:
    """The samples of a data file.

    Attributes:
        path: the file's path.
        samples: one per usable line, in order.
        skipped: the unusable lines, as number (from 1) and reason. Empty lines are not counted.
    """

    path: Path
    samples: list[Sample] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)


def read_data_file(path: str | Path) -> DataFile:
    """The samples of a data file; the format is recognised from each line's fields.

    Raises:
        HeteroKVError: a file that cannot be read, exceeds the limits of a run, or has no usable line.
    """
    path = Path(path)
    data_file = DataFile(path)
    for number, line in lines_of(path, "data file"):
        if not line.strip():
            continue
        try:
            data_file.samples.append(_sample(line.decode("utf-8", errors="backslashreplace"), path, number))
        except BrokenLine as error:
            data_file.skipped.append((number, shortened(str(error), _LONGEST_REASON)))
            if len(data_file.skipped) > MOST_SKIPPED:
                first, reason = data_file.skipped[0]
                raise HeteroKVError(
                    f"data file {path}: more than {MOST_SKIPPED:,} lines cannot be used; line {first}: {reason}"
                ) from error
    if not data_file.samples:
        number, reason = data_file.skipped[0] if data_file.skipped else (1, "the file is empty")
        raise HeteroKVError(f"data file {path}: no line can be used; line {number}: {reason}")
    return data_file


def _sample(line: str, path: Path, number: int) -> Sample:
    try:
        record = parsed(line)
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
