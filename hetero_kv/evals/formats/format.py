"""What a public data file's lines can be, and the tasks they are scored by. A new format is one new file."""

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
    """Why a line of a data file cannot be used."""


def asked_of(prompt: str, **filled: str) -> str:
    """What a benchmark's prompt with a place for `context` says behind it, its other places filled."""
    return prompt.rpartition("{context}")[2].format(**filled).lstrip()


@dataclass(frozen=True)
class Line:
    """One line of a data file: its JSON object, the file it is from, and its number, from 1."""

    record: Mapping[str, Any]
    path: Path
    number: int

    def text(self, field: str) -> str:
        """The string in `field`. Raises BrokenLine where it is something else."""
        value = self.record.get(field)
        if not isinstance(value, str):
            raise BrokenLine(f"field {field!r} is {type(value).__name__}, not a string")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """The strings in `field`, at least one; a single string or number counts as one.

        Raises:
            BrokenLine: nothing there, or something else.
        """
        value = self.record.get(field)
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(one, str | int | float) for one in values):
            raise BrokenLine(f"field {field!r} is {json.dumps(value)[:60]}, not a list of strings")
        return tuple(str(one) for one in values)

    def id(self, task: str) -> str:
        """The sample's id: what the line says, not where the file lies, tells it from the others."""
        digest = hashlib.sha256(json.dumps(self.record, sort_keys=True).encode()).hexdigest()[:8]
        return f"{task}/{self.number}-{digest}"

    @property
    def names(self) -> tuple[str, ...]:
        """What the line or its file may be named after: a field `task` or `dataset`, the file, its directory."""
        fields = [self.record.get(field) for field in ("task", "dataset")]
        stem = self.path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
        return (*(field for field in fields if isinstance(field, str)), stem, self.path.absolute().parent.name)


class DataFormat(ABC):
    """A benchmark's data files.

    Attributes:
        name: of the benchmark.
        meaning: one line for `--help` and the documentation.
    """

    name: str
    meaning: str

    @abstractmethod
    def recognises(self, record: Mapping[str, Any]) -> bool:
        """Whether a line with these fields is one of this format's."""

    @abstractmethod
    def sample(self, line: Line) -> Sample:
        """The line as a sample, its prompt in the benchmark's wording. Raises BrokenLine."""


class DataFileTask(Task):
    """A task whose samples come from a data file only."""

    from_data_file = True

    def generate(self, request: TaskRequest) -> Iterator[Sample]:
        """Always an error: see Task."""
        raise HeteroKVError(f"task {self.name}: its samples are in the benchmark's data file; give it with --data FILE")


_FORMATS: list[DataFormat] = []


def register_format(data_format: DataFormat) -> None:
    """Make a format known; where two recognise a line, the first one has it."""
    _FORMATS.append(data_format)


def formats() -> Sequence[DataFormat]:
    """The registered formats."""
    return tuple(_FORMATS)
