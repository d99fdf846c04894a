"""The answers of a conversation as events: thoughts, texts and tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hetero_kv.server.answer_events import CallArguments, CallBegun, Content, Event, Reasoning
from hetero_kv.server.generation import Answers, Ended, Source, Token
from hetero_kv.server.usage import FINISH_REASONS
from hetero_kv.serving.stream import Piece, Progress


@dataclass
class CallSoFar:
    """A tool call as far as it has come; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class AnswerSoFar:
    """What an answer consists of as far as it has come; `reasoning_tokens` are those before text and calls."""

    reasoning: str = ""
    reasoning_tokens: int = 0
    content: str = ""
    calls: list[CallSoFar] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Append an event."""
        match event:
            case Reasoning(text):
                self.reasoning += text
            case Content(text):
                self.content += text
            case CallBegun(_, call_id, name):
                self.calls.append(CallSoFar(call_id, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text


@dataclass(frozen=True)
class ChatToken(Token):
    """Token number `index` of an answer, and the events that have become certain with it."""

    index: int
    events: Sequence[Event]


@dataclass(frozen=True)
class ChatEnded(Ended):
    """An answer is complete; `events` are the last ones."""

    events: Sequence[Event]
    answer: AnswerSoFar


class Parser(Protocol):
    """Reads events out of an answer's tokens."""

    def add(self, piece: Piece) -> Sequence[Event]:
        """The events that have become certain with a token."""

    def end(self, rest: str) -> Sequence[Event]:
        """The last events; `rest` is text that no token's piece had."""


class PlainParser:
    """Reads an answer as content."""

    def add(self, piece: Piece) -> Sequence[Event]:
        """See `Parser`."""
        return [Content(piece.text)] if piece.text else []

    def end(self, rest: str) -> Sequence[Event]:
        """See `Parser`."""
        return [Content(rest)] if rest else []


class ChatAnswers(Source):
    """The answers to a conversation.

    Args:
        answers: their tokens.
        parsers: one for each answer.
    """

    def __init__(self, answers: Answers, parsers: Sequence[Parser]) -> None:
        self._answers, self._parsers = answers, parsers

    def __enter__(self) -> ChatAnswers:
        self._answers.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._answers.__exit__(*raised)

    @property
    def progress(self) -> Progress | None:
        """See `Source`."""
        return self._answers.progress

    async def events(self) -> AsyncIterator[ChatToken | ChatEnded]:
        """See `Source`."""
        so_far = [AnswerSoFar() for _ in self._parsers]
        counts = [0] * len(self._parsers)
        async for item in self._answers.events():
            parser, answer = self._parsers[item.choice], so_far[item.choice]
            if isinstance(item, Token):
                events = parser.add(item.piece)
                is_thinking = not answer.content and not answer.calls
                if is_thinking and (answer.reasoning or any(isinstance(each, Reasoning) for each in events)):
                    answer.reasoning_tokens = counts[item.choice] + 1
                yield ChatToken(item.choice, item.piece, counts[item.choice], events)
                counts[item.choice] += 1
            else:
                known = sum(len(piece.text) for piece in item.completion.pieces)
                events = parser.end(item.completion.text[known:])
            for event in events:
                answer.add(event)
            if isinstance(item, Ended):
                yield ChatEnded(item.choice, item.completion, events, answer)


def finish_reason(ended: ChatEnded) -> str:
    """Why an answer ended, in OpenAI's words."""
    reason = FINISH_REASONS[ended.completion.finish_reason]
    return "tool_calls" if ended.answer.calls and reason == "stop" else reason
