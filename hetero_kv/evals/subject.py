"""Subjects of a measurement: anything that answers samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.outcome import Cost, Outcome
from hetero_kv.evals.sample import Sample

#: A model as a function: returns a sample's answers, one text per turn.
Answerer = Callable[[Sample], Sequence[str]]

#: The number of tokens in a text.
CountTokens = Callable[[str], int]


class Subject(Protocol):
    """One or more methods that are measured on the same samples."""

    @property
    def methods(self) -> Sequence[str]:
        """The methods' names."""

    def described(self) -> dict[str, Any]:
        """Method -> the settings that its results depend on, as plain data."""

    def refusal(self, sample: Sample) -> str | None:
        """The reason why the methods cannot answer a sample; None if they can."""

    def answers(self, sample: Sample, methods: Sequence[str]) -> Iterator[Outcome]:
        """The outcome of each of `methods`, in their order."""

    def attended(self, method: str, length: int) -> float | None:
        """Tokens that a step of `method` attends to after `length` tokens; None if unknown."""


class CallableSubject:
    """A model known only as a function: another library, a server, a person.

    Args:
        name: its name in results and tables.
        answer: called with a sample; returns one text per turn.
        settings: all settings that its answers depend on, as plain data; a run can only continue with the same ones.
        attended: maps the tokens of the prompt to those that a step attends to; None if unknown.
    """

    def __init__(
        self,
        name: str,
        answer: Answerer,
        *,
        settings: Mapping[str, Any] | None = None,
        attended: Callable[[int], float] | None = None,
    ) -> None:
        self.methods = (name,)
        self._answer = answer
        self._settings = dict(settings or {})
        self._attended = attended

    def described(self) -> dict[str, Any]:
        return {self.methods[0]: self._settings}

    def attended(self, method: str, length: int) -> float | None:
        return None if self._attended is None else self._attended(length)

    def refusal(self, sample: Sample) -> str | None:
        """See Subject: refuses no sample."""
        return None

    def answers(self, sample: Sample, methods: Sequence[str]) -> Iterator[Outcome]:
        """See Subject. Raises HeteroKVError if the number of texts differs from the number of turns."""
        start = time.perf_counter()
        predictions = self._answer(sample)
        seconds = time.perf_counter() - start
        wrong = isinstance(predictions, str) or not all(isinstance(text, str) for text in predictions)
        if wrong or len(predictions) != len(sample.turns):
            raise HeteroKVError(
                f"{self.methods[0]} answered sample {sample.id} with {predictions!r}; it must return a sequence of "
                f"{len(sample.turns)} texts, one per turn"
            )
        yield Outcome(self.methods[0], tuple(predictions), Cost(decode_s=seconds))
