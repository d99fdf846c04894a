"""Tasks that measure a model's logits, unlike tasks that score its texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.configured_model import ConfiguredModel
from hetero_kv.evals.outcome import Outcome
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.tasks.registry import Task, TaskRequest


@dataclass(frozen=True)
class PromptFile:
    """A user's file: its name in reports, and its text."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LogitsTaskRequest(TaskRequest):
    """A request for samples of a task that measures logits.

    Attributes:
        prompt_files: the user's texts; they replace the haystack.
        encode: a text's tokens, without special tokens.
        decode: the text of tokens.
        max_new_tokens: the length of a continuation.
        prefill_tokens: how many tokens of a text to prefill before feeding the others; None for the task's default.
        stride: how many of the others to feed at once.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    prompt_files: tuple[PromptFile, ...] = ()
    max_new_tokens: int = 64
    prefill_tokens: int | None = None
    stride: int = 1


class LogitsTask(Task):
    """A task that measures a model's logits: it needs the model, not only a function that answers."""

    @abstractmethod
    def samples(self, request: LogitsTaskRequest) -> Iterator[Sample]:
        """Like `Task.generate`."""

    def require_methods(self, request: LogitsTaskRequest, model: ConfiguredModel) -> None:
        """Raise HeteroKVError if a method of `model` cannot be measured as requested; by default never."""

    @abstractmethod
    def measure(self, sample: Sample, model: ConfiguredModel, methods: Sequence[str]) -> Iterator[Outcome]:
        """The outcome of each of `methods` on the sample, with its score, in their order."""

    def generate(self, request: TaskRequest) -> Iterator[Sample]:
        """See Task. Raises HeteroKVError unless `request` is a LogitsTaskRequest."""
        if not isinstance(request, LogitsTaskRequest):
            raise HeteroKVError(f"task {self.name!r} cuts texts into tokens; give a LogitsTaskRequest")
        return self.samples(request)

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """Always raises HeteroKVError: the task measures logits, not texts."""
        raise HeteroKVError(f"task {self.name!r} is measured from logits, not scored from texts; call measure")
