"""The formats of public data files, and the tasks that score them. A new format is one new file."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.tasks.registry import Task, TaskRequest


class BrokenLine(ValueError):
    """A line of a data file that cannot be used, with the reason."""


def question_of(prompt: str, **filled: str) -> str:
    """The part of a benchmark's prompt after the place of `context`, with its other places filled."""
    return prompt.rpartition("{context}")[2].format(**filled).lstrip()


@dataclass(frozen=True)
class Line:
    """One line of a data file: its JSON object, its file, and its number, from 1."""

    record: Mapping[str, Any]
    path: Path
    number: int

    def text(self, field: str) -> str:
        """The string in `field`. Raises BrokenLine if it is something else."""
        value = self.record.get(field)
        if not isinstance(value, str):
            raise BrokenLine(f"field {field!r} is {type(value).__name__}, not a string")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """The strings in `field`, at least one; a single string or number counts as one.

        Raises:
            BrokenLine: the field is missing, empty, or something else.
        """
        value = self.record.get(field)
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(one, str | int | float) for one in values):
            raise BrokenLine(f"field {field!r} is {json.dumps(value)[:60]}, not a list of strings")
        return tuple(str(one) for one in values)

    def id(self, task: str) -> str:
        """The sample's id, which depends on the line's content and number, not on the file's place."""
        digest = hashlib.sha256(json.dumps(self.record, sort_keys=True).encode()).hexdigest()[:8]
        return f"{task}/{self.number}-{digest}"

    @property
    def names(self) -> tuple[str, ...]:
        """Possible names of the line's task: its fields `task` and `dataset`, the file's name, the directory's name."""
        fields = [self.record.get(field) for field in ("task", "dataset")]
        stem = self.path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
        return (*(field for field in fields if isinstance(field, str)), stem, self.path.absolute().parent.name)


class DataFormat(ABC):
    """A benchmark's data files.

    Attributes:
        name: the benchmark's name.
        meaning: a one-line description for `--help` and the documentation.
    """

    name: str
    meaning: str

    @abstractmethod
    def recognises(self, record: Mapping[str, Any]) -> bool:
        """Whether a line with these fields has this format."""

    @abstractmethod
    def sample(self, line: Line) -> Sample:
        """The line as a sample, with the benchmark's prompt. Raises BrokenLine."""


class DataFileTask(Task):
    """A task whose samples come from a data file only."""

    from_data_file = True

    def generate(self, request: TaskRequest) -> Iterator[Sample]:
        """Always raises HeteroKVError: the data file has the samples."""
        raise HeteroKVError(f"task {self.name}: its samples are in the benchmark's data file; give it with --data FILE")


_FORMATS: list[DataFormat] = []


def register_format(data_format: DataFormat) -> None:
    """Register a format; the first format that recognises a line is used."""
    _FORMATS.append(data_format)


def formats() -> Sequence[DataFormat]:
    """The registered formats."""
    return tuple(_FORMATS)
