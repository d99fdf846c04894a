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
        reasoning: the thought; "" if there is none.
        content: the text; "" if there is none. Includes invalid calls, as the model wrote them.
        calls: the valid tool calls.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    _begun: dict[int, Call] = field(default_factory=dict, repr=False)

    def add(self, events: Iterable[Event]) -> None:
        """Append the events of an `AnswerParser`."""
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, CallBegun):
                self._begun[event.index] = Call(event.id, event.name)
            elif isinstance(event, CallArguments):
                self._begun[event.index].arguments += event.text
            elif isinstance(event, CallEnded):
                call = self._begun.pop(event.index)
                if event.is_valid:
                    self.calls.append(call)
                else:
                    self.content += event.text
