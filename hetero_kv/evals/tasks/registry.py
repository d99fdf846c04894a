"""The tasks by name. A new task is one new file with one registration."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.sample import Sample, Score


@dataclass(frozen=True)
class TaskRequest:
    """The choice of a task's samples.

    Attributes:
        lengths: prompt lengths, tokens.
        depths: where the answer is placed, per cent of the context; for tasks that use depths.
        samples: samples per length (and depth).
        seed: the same seed gives the same samples.
        haystack: the text that needles are hidden in; None for each task's default.
        count_tokens: counts a text's tokens, without chat template and special tokens.
        template_tokens: tokens that the chat template adds to a question; they count in a prompt's length.
        data_file: for tasks that are built from published data (RULER's qa).
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    seed: int
    haystack: Haystack | None
    count_tokens: Callable[[str], int]
    template_tokens: int = 0
    data_file: Path | None = None


class Task(ABC):
    """A kind of question.

    Attributes:
        name: the name for `--task`.
        meaning: a one-line description for `--help` and the documentation.
        uses_depth: whether there are samples for each depth of the request.
        uses_haystack: whether samples use the request's haystack, or noise without one.
        from_data_file: whether samples come only from a data file (`--data`), so that `generate` cannot make any.
        needs_data_file: whether samples are built from published data (`NAME=FILE`).
    """

    name: str
    meaning: str
    uses_depth: bool = False
    uses_haystack: bool = False
    from_data_file: bool = False
    needs_data_file: bool = False

    @abstractmethod
    def generate(self, request: TaskRequest) -> Iterator[Sample]:
        """The samples, by length, depth and number; a length's samples do not depend on the other lengths.

        Raises:
            HeteroKVError: a length too small for the task, or a missing data file.
        """

    @abstractmethod
    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """The score of the answers: `predictions` has one text per turn, without the answer prefix."""


_REGISTRY: dict[str, Task] = {}

_SomeTask = TypeVar("_SomeTask", bound=Task)


def register(task: _SomeTask) -> _SomeTask:
    """Register `task` under its name."""
    _REGISTRY[task.name] = task
    return task


def names() -> tuple[str, ...]:
    """The tasks that generate their samples, in order of registration."""
    return tuple(name for name, task in _REGISTRY.items() if not task.from_data_file)


def data_file_names() -> tuple[str, ...]:
    """The tasks whose samples come from data files only, in order of registration."""
    return tuple(name for name, task in _REGISTRY.items() if task.from_data_file)


def get(name: str) -> Task:
    """The task `name`. Raises HeteroKVError for an unknown one."""
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}? Known: " if near else "known: "
        raise HeteroKVError(f"task {name!r} is not known; {hint}{', '.join(names())}")
    return _REGISTRY[name]
