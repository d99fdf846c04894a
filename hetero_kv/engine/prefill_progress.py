"""Prefill progress: the part of a prompt in progress, the tokens that are the question, and how many are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetero_kv.engine.step import PromptPart
from hetero_kv.errors import HeteroKVError

#: Called during prefill: (layers done, layers in all, tokens of the layer done, tokens of the prompt).
Progress = Callable[[int, int, int, int], None]


class PrefillProgress:
    """The part of a cache that tracks the prompt in progress; it is empty between prompts.

    Attributes:
        on_progress: called after every prefilled chunk; may be None.
    """

    layers: list[Any]

    def __init__(self, on_progress: Progress | None) -> None:
        self.on_progress = on_progress
        self._end_passing()
        self._question: int | None = None

    def _end_passing(self) -> None:
        # The stride of a prompt in progress: (start, stop, tokens of the prompt).
        self._stride: tuple[int, int, int] | None = None
        self._transient = False

    @property
    def _part(self) -> PromptPart:
        """The part of a prompt that the next forward computes."""
        first, last = (
            (True, True) if self._stride is None else (self._stride[0] == 0, self._stride[1] == self._stride[2])
        )
        return PromptPart(first, last, self._question)

    @contextmanager
    def asking(self, question: int | None) -> Iterator[None]:
        """Within this context the last `question` tokens of a prompt, in every row, are its question about the rest.

        Operators whose `observation` is `question` observe the attention of these tokens. None when the question is
        unknown.

        Raises HeteroKVError for less than one token.
        """
        if question is not None and question < 1:
            raise HeteroKVError(f"question is {question}; pass its number of tokens, at least 1, or None")
        try:
            self._question = question
            yield
        finally:
            self._question = None

    @contextmanager
    def prompt_part(self, start: int, stop: int, total: int) -> Iterator[None]:
        """Within this context tokens `start` to `stop` of a prompt of `total` pass through all layers."""
        try:
            self._stride = (start, stop, total)
            yield
        finally:
            self._stride = None

    @contextmanager
    def transient(self) -> Iterator[None]:
        """Within this context tokens attend, but no block stores them and no progress is reported."""
        on_progress, self.on_progress = self.on_progress, None
        self._transient = True
        try:
            yield
        finally:
            self.on_progress, self._transient = on_progress, False

    def report_progress(self, layer_idx: int, done: int, total: int) -> None:
        """Report to `on_progress` that layer `layer_idx` has prefilled `done` of `total` tokens."""
        if self.on_progress is None:
            return
        if self._stride is None:
            self.on_progress(layer_idx + (done == total), len(self.layers), done, total)
            return
        # A stride passes all layers, so progress is a share of the tokens, as with a single layer.
        start, stop, whole = self._stride
        passed = start + (stop - start) * (layer_idx * total + done) // (len(self.layers) * total)
        self.on_progress(int(passed == whole), 1, passed, whole)
