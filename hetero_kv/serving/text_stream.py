"""An answer's text, token by token: only whole characters, and nothing that may be the beginning of a stop text."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

# Decoders write this for bytes that are no character, or not a whole one yet. Byte fallback writes it for every byte of
# an incomplete run, so any number of them may still change.
UNFINISHED = "\ufffd"


class TextStream:
    """Decodes tokens one by one.

    Args:
        tokenizer: a transformers tokenizer; special tokens have no text.
        stop: texts; the first one that appears ends the answer.
        markers: ids of further tokens without a text.

    Attributes:
        text: the text that is certain so far.
        found: the stop text that has ended the answer; None before.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), markers: Container[int] = ()) -> None:
        self.text = ""
        self.found: str | None = None
        self._tokenizer, self._stop, self._markers = tokenizer, tuple(stop), markers
        self._tokens: list[int] = []
        # The text of tokens [first, read) is known; a token's text may depend on the one before.
        self._first = self._read = 0
        # Decoded text that may be the beginning of a stop text.
        self._pending = ""

    def add(self, token: int) -> str:
        """The text that has become certain with this token; often "". A marker follows all text before it."""
        if token in self._markers:
            text = self.end()
            # The next token's text may depend on it.
            self._first, self._read = len(self._tokens), len(self._tokens) + 1
            self._tokens.append(token)
            return text
        self._tokens.append(token)
        before, now = self._decoded(self._first, self._read), self._decoded(self._first, len(self._tokens))
        if now.endswith(UNFINISHED) or len(now) <= len(before):
            return ""
        self._first, self._read = self._read, len(self._tokens)
        return self._certain(now[len(before) :], is_last=False)

    def end(self) -> str:
        """The rest of the text, once no token follows."""
        before, now = self._decoded(self._first, self._read), self._decoded(self._first, len(self._tokens))
        self._first = self._read = len(self._tokens)
        return self._certain(now[len(before) :], is_last=True)

    def _decoded(self, first: int, stop: int) -> str:
        return self._tokenizer.decode(self._tokens[first:stop], skip_special_tokens=True)

    def _certain(self, new: str, *, is_last: bool) -> str:
        if self.found is not None:
            return ""
        text = self._pending + new
        places = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places, key=lambda each: each[0])
            piece, self._pending = text[:place], ""
        else:
            certain = len(text) if is_last else len(text) - self._possible_beginning(text)
            piece, self._pending = text[:certain], text[certain:]
        self.text += piece
        return piece

    def _possible_beginning(self, text: str) -> int:
        """How many of the text's last characters may be the beginning of a stop text."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        return next(
            (size for size in range(min(longest, len(text)), 0, -1) if self._begins_stop(text[-size:])),
            0,
        )

    def _begins_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)
