"""The answers of a conversation as events: thoughts, texts and tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from hetero_kv.server.generation import Answers, Ended, Source, Token
from hetero_kv.server.usage import FINISH_REASONS
from hetero_kv.serving.answers import Answer, AnswerParser, CallEnded, Event, Reasoning
from hetero_kv.serving.stream import Progress


@dataclass(frozen=True)
class ChatToken(Token):
    """Token number `index` of an answer, and the events that have become certain with it."""

    index: int
    events: Sequence[Event]


@dataclass(frozen=True)
class ChatEnded(Ended):
    """An answer is complete; `events` are the last ones, `reasoning_tokens` those before its text and its calls."""

    events: Sequence[Event]
    answer: Answer
    reasoning_tokens: int


class ChatAnswers(Source):
    """The answers to a conversation.

    Args:
        answers: their tokens.
        parsers: one for each answer.
        ends_with_call: whether an answer ends with its first tool call.
    """

    def __init__(self, answers: Answers, parsers: Sequence[AnswerParser], *, ends_with_call: bool = False) -> None:
        self._answers, self._parsers, self._ends_with_call = answers, parsers, ends_with_call

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
        answers = [Answer() for _ in self._parsers]
        counts, thought = [0] * len(self._parsers), [0] * len(self._parsers)
        has_spoken = [False] * len(self._parsers)
        async for item in self._answers.events():
            number = item.choice
            parser, answer = self._parsers[number], answers[number]
            if isinstance(item, Token):
                events = self._up_to_first_call(answer, parser.add(item.piece))
                if self._ends_with_call and any(isinstance(event, CallEnded) and event.is_valid for event in events):
                    self._answers.end(number)
                answer.add(events)
                counts[number] += 1
                has_spoken[number] |= any(not isinstance(event, Reasoning) for event in events)
                if answer.reasoning and not has_spoken[number]:
                    thought[number] = counts[number]
                yield ChatToken(number, item.piece, counts[number] - 1, events)
            else:
                events = self._up_to_first_call(answer, parser.end(item.completion.text))
                if item.completion.finish_reason != "end":
                    # A call that is cut off stays as far as it came. One that the model left is text.
                    events = [event for event in events if not isinstance(event, CallEnded) or event.is_valid]
                answer.add(events)
                yield ChatEnded(number, item.completion, events, answer, thought[number])

    def _up_to_first_call(self, answer: Answer, events: Sequence[Event]) -> Sequence[Event]:
        """The events up to the first call, where an answer ends with it."""
        if not self._ends_with_call:
            return events
        if answer.calls and not answer.is_cut:
            return []
        ends = (place for place, event in enumerate(events, 1) if isinstance(event, CallEnded) and event.is_valid)
        return events[: next(ends, len(events))]


def finish_reason(ended: ChatEnded) -> str:
    """Why an answer ended, in OpenAI's terms."""
    reason = FINISH_REASONS[ended.completion.finish_reason]
    has_calls = ended.answer.calls and not ended.answer.is_cut
    return "tool_calls" if has_calls and reason == "stop" else reason
