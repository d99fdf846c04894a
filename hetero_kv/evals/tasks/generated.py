"""The common part of tasks that generate samples: the loop over lengths, depths and numbers, and prompt lengths."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.sample import Sample, question_after
from hetero_kv.evals.tasks.drawing import Cell
from hetero_kv.evals.tasks.fitting import Fitted, fit
from hetero_kv.evals.tasks.registry import Task, TaskRequest


class GeneratedTask(Task):
    """A task that generates its samples from random material.

    Attributes:
        max_new_tokens: the most tokens of an answer.
        question_begins_behind: its last occurrence in the first turn separates the text from the question about it.
    """

    max_new_tokens: int
    question_begins_behind = "\n"

    def generate(self, request: TaskRequest) -> Iterator[Sample]:
        """One sample per length, depth (if the task uses it) and number.

        Raises:
            HeteroKVError: a length too small for the task, a depth outside 0..100, or no depth for a task that uses it.
        """
        if self.uses_depth and not request.depths:
            raise HeteroKVError(f"task {self.name}: no depth is given; give --depths, such as 0,50,100")
        wrong = [depth for depth in request.depths if not 0 <= depth <= 100]
        if self.uses_depth and wrong:
            raise HeteroKVError(f"task {self.name}: depth {wrong[0]:g}; it is per cent of the context, give 0 to 100")
        for length in request.lengths:
            for depth in request.depths if self.uses_depth else (None,):
                for number in range(request.samples):
                    yield self.make(Cell(self.name, request.seed, length, depth, number), request)

    @abstractmethod
    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell."""

    def fitted(
        self,
        cell: Cell,
        request: TaskRequest,
        build: Callable[[int], str],
        answer_prefix: str = "",
        least: int = 1,
    ) -> Fitted:
        """The prompt `build(units)` that has the cell's length including its prefix and the chat template."""
        around = request.template_tokens + (request.count_tokens(answer_prefix) if answer_prefix else 0)
        return fit(build, lambda text: request.count_tokens(text) + around, cell.length, self.name, least)

    def sample(
        self,
        cell: Cell,
        turns: tuple[str, ...],
        answers: tuple[tuple[str, ...], ...],
        answer_prefix: str = "",
        **metadata: Any,
    ) -> Sample:
        """The cell's sample."""
        kept: Mapping[str, Any] = metadata
        return Sample(
            id=cell.id,
            task=self.name,
            turns=turns,
            answers=answers,
            length=cell.length,
            depth=cell.depth,
            max_new_tokens=self.max_new_tokens,
            answer_prefix=answer_prefix,
            question=question_after(self.question_begins_behind, turns[0]),
            metadata=kept,
        )


def haystack_of(request: TaskRequest) -> Haystack:
    """The request's haystack, else noise."""
    return request.haystack or Haystack.noise()
