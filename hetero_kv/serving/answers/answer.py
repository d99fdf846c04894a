"""A whole answer, assembled from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hetero_kv.serving.answers.events import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning


@dataclass
class Call:
    """A tool call.

    Attributes:
        id: nine letters and digits.
        name: the tool's.
        arguments: JSON text of an object.
    """

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """An answer as OpenAI's API returns it without streaming.

    Attributes:
        parts: its thoughts, texts and calls, in their order. Invalid calls are texts, as the model wrote them.
    """

    parts: list[Reasoning | Content | Call] = field(default_factory=list)
    _open: Call | None = field(default=None, repr=False)

    @property
    def reasoning(self) -> str:
        """The thought; "" if there is none."""
        return "".join([part.text for part in self.parts if isinstance(part, Reasoning)])

    @property
    def content(self) -> str:
        """The text; "" if there is none."""
        return "".join([part.text for part in self.parts if isinstance(part, Content)])

    @property
    def calls(self) -> list[Call]:
        """The tool calls; if it `is_cut`, the last one as far as it came."""
        return [part for part in self.parts if isinstance(part, Call)]

    @property
    def is_cut(self) -> bool:
        """Whether it ends within a call."""
        return self._open is not None

    def add(self, events: Iterable[Event]) -> None:
        """Append the events of an `AnswerParser`."""
        for event in events:
            if isinstance(event, Reasoning | Content):
                self._append(event)
            elif isinstance(event, CallBegun):
                self._open = Call(event.id, event.name)
                self.parts.append(self._open)
            elif self._open is not None and isinstance(event, CallArguments):
                self._open.arguments += event.text
            elif self._open is not None and isinstance(event, CallEnded):
                if not event.is_valid:
                    self.parts.remove(self._open)
                    self._append(Content(event.text))
                self._open = None

    def _append(self, part: Reasoning | Content) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, Reasoning | Content) and type(last) is type(part):
            self.parts[-1] = type(part)(last.text + part.text)
        else:
            self.parts.append(part)
