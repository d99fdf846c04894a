"""Collects the events of an answer, without the white space between its parts."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection

from hetero_kv.serving.answers.events import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning
from hetero_kv.serving.answers.reader import Reader

_CHARACTERS = string.ascii_letters + string.digits


class _Trimmed:
    """Emits text without leading line ends, and holds back trailing white space until more text arrives."""

    def __init__(self, emit: Callable[[str], object]) -> None:
        self._emit, self._space = emit, ""
        self.is_empty, self.trims = True, False

    def add(self, text: str) -> None:
        text = self._space + text
        if self.is_empty and self.trims:
            text = text.lstrip("\r\n")
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self.is_empty = False
            self._emit(certain)

    def drop_space(self) -> None:
        self._space = ""

    def flush(self) -> None:
        if self._space:
            self._emit(self._space)
        self._space = ""


class EventWriter:
    """The events of an answer.

    Args:
        reader: the answer; `reader.taken` is the text of a call that fails.
        names: the tools of the request.

    Attributes:
        events: the events that were not fetched yet.
        names: the tools of the request.
    """

    def __init__(self, reader: Reader, names: Collection[str]) -> None:
        self.events: list[Event] = []
        self.names = names
        self._reader = reader
        self._content = _Trimmed(lambda text: self.events.append(Content(text)))
        self._reasoning = _Trimmed(lambda text: self.events.append(Reasoning(text)))
        self._reasoning.trims = True
        self._calls = 0
        self._is_open = False

    def reasoning(self, text: str) -> None:
        """Add a part of the thought."""
        self._reasoning.add(text)

    def content(self, text: str) -> None:
        """Add a part of the answer's text."""
        self._content.add(text)

    def end_thought(self) -> None:
        """End the thought; line ends between it and the answer belong to the format."""
        self._reasoning.drop_space()
        self._content.trims = True

    def begin_message(self) -> None:
        """Begin another message of the answer; an empty line separates it from the one before."""
        if not self._content.is_empty:
            self._content.drop_space()
            self._content.add("\n\n")

    def begin_thought(self) -> None:
        """Begin another thought."""
        if not self._reasoning.is_empty:
            self._reasoning.add("\n\n")

    def begin(self, name: str) -> None:
        """Begin a call of this tool; white space before it belongs to the format."""
        self._content.drop_space()
        identifier = "".join(secrets.choice(_CHARACTERS) for _ in range(9))
        self.events.append(CallBegun(self._calls, identifier, name))
        self._is_open = True

    def arguments(self, text: str) -> None:
        """Add a part of the arguments of the open call."""
        if text:
            self.events.append(CallArguments(self._calls, text))

    def end(self) -> None:
        """End the open call as valid."""
        self._end(is_valid=True)

    def fail(self) -> None:
        """Treat the text read since the marker as content; if a call has begun, end it as invalid."""
        if self._is_open:
            self._end(is_valid=False)
        else:
            self.content(self._reader.plain(self._reader.taken))

    def _end(self, *, is_valid: bool) -> None:
        self.events.append(CallEnded(self._calls, is_valid, self._reader.plain(self._reader.taken)))
        self._calls += 1
        self._is_open = False

    def close(self) -> None:
        """End the answer."""
        self._reasoning.flush()
        self._content.flush()
