"""What can be measured: anything that answers samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.outcome import Cost, Outcome
from hetero_kv.evals.sample import Sample

#: A model as a function: a sample's answers, one text per turn.
Answerer = Callable[[Sample], Sequence[str]]

#: The number of tokens in a text.
CountTokens = Callable[[str], int]


class Subject(Protocol):
    """One or several methods that are measured on the same samples."""

    @property
    def methods(self) -> Sequence[str]:
        """Their names."""

    def described(self) -> dict[str, Any]:
        """Method -> what its results depend on, as plain data."""

    def refusal(self, sample: Sample) -> str | None:
        """Why a sample cannot be put to these methods; None when it can."""

    def answers(self, sample: Sample, methods: Sequence[str]) -> Iterator[Outcome]:
        """What each of `methods` answers, in their order."""

    def attended(self, method: str, length: int) -> float | None:
        """Tokens that a step of `method` attends to after `length` tokens; None where it is not known."""


class CallableSubject:
    """A model that is known only as a function: another library, a server, a person.

    Args:
        name: what results and tables call it.
        answer: called with a sample; returns one text per turn.
        settings: what its answers depend on, as plain data; a run that goes on must have the same.
        attended: tokens that a step attends to, given the tokens of the prompt; None where it is not known.
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
        """See Subject: everything is put to it."""
        return None

    def answers(self, sample: Sample, methods: Sequence[str]) -> Iterator[Outcome]:
        """See Subject. Raises HeteroKVError when the function returns another number of texts than turns."""
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
