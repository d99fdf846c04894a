"""What is said of a prompt while it passes through a model: which part of it, what of it asks, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetero_kv.engine.step import PromptPart
from hetero_kv.errors import HeteroKVError

#: Called while a prompt prefills: (layers done, layers in all, tokens of the layer done, tokens of the prompt).
Progress = Callable[[int, int, int, int], None]


class PassingPrompt:
    """A cache's part that knows of the prompt under way; between prompts it says nothing.

    Attributes:
        on_progress: called after every prefilled chunk; None where nobody listens.
    """

    layers: list[Any]

    def __init__(self, on_progress: Progress | None) -> None:
        self.on_progress = on_progress
        self._end_passing()
        self._question: int | None = None

    def _end_passing(self) -> None:
        # Of a prompt that passes in strides: tokens before the present one, behind it, and of the prompt.
        self._stride: tuple[int, int, int] | None = None
        self._transient = False

    @property
    def _part(self) -> PromptPart:
        """Which part of a prompt the next forward is."""
        first, last = (
            (True, True) if self._stride is None else (self._stride[0] == 0, self._stride[1] == self._stride[2])
        )
        return PromptPart(first, last, self._question)

    @contextmanager
    def asking(self, question: int | None) -> Iterator[None]:
        """Within this context the last `question` tokens of a prompt ask what comes before, in every row.

        Operators whose `observation` is `question` watch what these attend to. None where nobody says.

        Raises HeteroKVError for less than one token.
        """
        if question is not None and question < 1:
            raise HeteroKVError(f"question is {question}; give its number of tokens, at least 1, or None")
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
        """Within this context tokens attend, nothing of them is stored in any block, and no progress is told."""
        on_progress, self.on_progress = self.on_progress, None
        self._transient = True
        try:
            yield
        finally:
            self.on_progress, self._transient = on_progress, False

    def report_progress(self, layer_idx: int, done: int, total: int) -> None:
        """Tell `on_progress` that layer `layer_idx` has prefilled `done` of `total` tokens."""
        if self.on_progress is None:
            return
        if self._stride is None:
            self.on_progress(layer_idx + (done == total), len(self.layers), done, total)
            return
        # Strides go through all layers: what is done is a share of the tokens, as if there were one layer.
        start, stop, whole = self._stride
        passed = start + (stop - start) * (layer_idx * total + done) // (len(self.layers) * total)
        self.on_progress(int(passed == whole), 1, passed, whole)
