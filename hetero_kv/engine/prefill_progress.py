"""Prefill progress: what the next forwards compute of a prompt, and how many of its tokens are done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from hetero_kv.engine.forward_request import ForwardRequest
from hetero_kv.errors import HeteroKVError

#: Called during prefill: (layers done, layers in all, tokens of the layer done, tokens of the prompt).
Progress = Callable[[int, int, int, int], None]


class PrefillProgress:
    """The part of a cache that has what a caller requests of its next forwards, and reports a prompt's progress.

    Attributes:
        on_progress: called after every prefilled chunk; may be None.
        request: of the next forwards.
        chunk_tokens: the most tokens of a chunk of the next layers; None for the rules' `chunk_size`.
        passing_tokens: the most tokens of a chunk of the present layer.
    """

    chunk_tokens: int | None = None
    passing_tokens: int = 1

    @property
    @abstractmethod
    def number_of_layers(self) -> int:
        """Layers of the model."""

    def __init__(self, on_progress: Progress | None) -> None:
        self.on_progress = on_progress
        self.request = ForwardRequest()

    def _end_passing(self) -> None:
        self.request = replace(self.request, stride=None, stores=True)

    @contextmanager
    def requesting(self, **changes: Any) -> Iterator[None]:
        """Within this context the request has these fields (`ForwardRequest`)."""
        before = self.request
        self.request = replace(before, **changes)
        try:
            yield
        finally:
            self.request = before

    def asking(self, question: int | None) -> AbstractContextManager[None]:
        """Within this context the last `question` tokens of a prompt, in every row, are its question about the rest.

        Operators whose `observation` is `question` observe the attention of these tokens. None when the question is
        unknown.

        Raises HeteroKVError for less than one token.
        """
        if question is not None and question < 1:
            raise HeteroKVError(f"question is {question}; pass its number of tokens, at least 1, or None")
        return self.requesting(question=question)

    def prompt_part(self, start: int, stop: int, total: int) -> AbstractContextManager[None]:
        """Within this context tokens `start` to `stop` of a prompt of `total` pass through all layers."""
        return self.requesting(stride=(start, stop, total))

    @contextmanager
    def transient(self) -> Iterator[None]:
        """Within this context tokens attend, but no block stores them and no progress is reported."""
        on_progress, self.on_progress = self.on_progress, None
        try:
            with self.requesting(stores=False):
                yield
        finally:
            self.on_progress = on_progress

    def report_progress(self, layer_idx: int, done: int, total: int) -> None:
        """Report to `on_progress` that layer `layer_idx` has prefilled `done` of `total` tokens."""
        if self.on_progress is None:
            return
        if self.request.stride is None:
            self.on_progress(layer_idx + (done == total), self.number_of_layers, done, total)
            return
        # A stride passes all layers, so progress is a share of the tokens, as with a single layer.
        start, stop, whole = self.request.stride
        passed = start + (stop - start) * (layer_idx * total + done) // (self.number_of_layers * total)
        self.on_progress(int(passed == whole), 1, passed, whole)
