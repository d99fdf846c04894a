"""Separates a reasoning model's thoughts, between `<think>` and `</think>`, from its answer."""

from __future__ import annotations

from collections.abc import Callable

OPEN, CLOSE = "<think>", "</think>"


class Thoughts:
    """Passes on pieces of an answer, each marked as thought or answer; the tags themselves are removed.

    Args:
        write: called with a text and whether it is a thought.
    """

    def __init__(self, write: Callable[[str, bool], None]) -> None:
        self._write = write
        self._is_thinking = False
        self._begins = False
        self._pending = ""

    def add(self, piece: str) -> None:
        """Add the next piece of the text."""
        text = self._pending + piece
        while (sign := CLOSE if self._is_thinking else OPEN) in text:
            before, _, text = text.partition(sign)
            self._emit(before)
            self._is_thinking, self._begins = not self._is_thinking, True
        # A possible beginning of a tag waits for the rest of it.
        kept = next(size for size in range(len(sign) - 1, -1, -1) if text.endswith(sign[:size]))
        self._pending = text[len(text) - kept :]
        self._emit(text[: len(text) - kept])

    def end(self) -> None:
        """Write the rest: the text is complete."""
        self._emit(self._pending)
        self._pending = ""

    def _emit(self, text: str) -> None:
        # Blank lines around a tag belong to it.
        text = text.lstrip("\n") if self._begins else text
        if text:
            self._begins = False
            self._write(text, self._is_thinking)
