"""Events of an answer while it streams: parts of thoughts, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """A part of the thought before the answer."""

    text: str


@dataclass(frozen=True)
class Content:
    """A part of the answer's text."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A tool call begins.

    Attributes:
        index: its number in the answer, from 0.
        id: nine letters and digits, unique to the call.
        name: the tool's, as the model writes it.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """A tool call ends.

    Attributes:
        index: its number.
        is_valid: whether the parts of its arguments form one JSON object. If not, the model wrote other text, or the
            answer ended within the call.
        text: the whole call as the model wrote it, for clients that show an invalid call as content.
    """

    index: int
    is_valid: bool
    text: str


Event = Reasoning | Content | CallBegun | CallArguments | CallEnded


def joined(events: list[Event]) -> list[Event]:
    """The events, with consecutive parts of the same text merged."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            result[-1] = CallArguments(last.index, last.text + event.text)
        else:
            result.append(event)
    return result
