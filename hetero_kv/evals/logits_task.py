"""Tasks that are measured from a model's logits, beside those that are scored from its texts."""

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
    """A file of the user's own: its name as reports call it, and its text."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LogitsTaskRequest(TaskRequest):
    """Which samples are wanted of a task that is measured from logits.

    Attributes:
        prompt_files: the user's own texts; they win over the haystack.
        encode: a text's tokens, without special tokens.
        decode: the text of tokens.
        max_new_tokens: length of a continuation.
        prefill_tokens: what is prefilled of a text whose other tokens are then fed; None for the task's own.
        stride: how many of the others are fed at once.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    prompt_files: tuple[PromptFile, ...] = ()
    max_new_tokens: int = 64
    prefill_tokens: int | None = None
    stride: int = 1


class LogitsTask(Task):
    """A task that looks at a model's logits: it needs the model itself, not only a function that answers."""

    @abstractmethod
    def samples(self, request: LogitsTaskRequest) -> Iterator[Sample]:
        """As `Task.generate`."""

    def require_methods(self, request: LogitsTaskRequest, model: ConfiguredModel) -> None:
        """Raise HeteroKVError where a method of `model` cannot be measured as `request` asks; none by default."""

    @abstractmethod
    def measure(self, sample: Sample, model: ConfiguredModel, methods: Sequence[str]) -> Iterator[Outcome]:
        """What each of `methods` makes of the sample, with its score, in their order."""

    def generate(self, request: TaskRequest) -> Iterator[Sample]:
        """See Task. Raises HeteroKVError unless `request` is a LogitsTaskRequest."""
        if not isinstance(request, LogitsTaskRequest):
            raise HeteroKVError(f"task {self.name!r} cuts texts into tokens; give a LogitsTaskRequest")
        return self.samples(request)

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """Refused: texts are not what is measured. Raises HeteroKVError."""
        raise HeteroKVError(f"task {self.name!r} is measured from logits, not scored from texts; call measure")
