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
        self._held = ""

    def add(self, piece: str) -> None:
        """Add the next piece of the text."""
        text = self._held + piece
        while (sign := CLOSE if self._is_thinking else OPEN) in text:
            before, _, text = text.partition(sign)
            self._hand_on(before)
            self._is_thinking, self._begins = not self._is_thinking, True
        # A possible beginning of a tag waits for the rest of it.
        kept = next(size for size in range(len(sign) - 1, -1, -1) if text.endswith(sign[:size]))
        self._held = text[len(text) - kept :]
        self._hand_on(text[: len(text) - kept])

    def end(self) -> None:
        """Write the rest: the text is complete."""
        self._hand_on(self._held)
        self._held = ""

    def _hand_on(self, text: str) -> None:
        # Blank lines around a tag belong to it.
        text = text.lstrip("\n") if self._begins else text
        if text:
            self._begins = False
            self._write(text, self._is_thinking)
