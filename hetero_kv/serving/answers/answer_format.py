"""The formats in which model families write thoughts and tool calls: their base class and registry."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.answers.call_grammar import Part
from hetero_kv.serving.answers.reader import MalformedError, Reader, Reading
from hetero_kv.serving.answers.writing import EventWriter

#: The markers around thoughts. The first pair that the chat template contains is the model's.
THOUGHTS = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("Here is my thought process:", "Here is my response:"),
    ("<think>", "</think>"),
)

_FORMATS: dict[str, type[AnswerFormat]] = {}


def registered(name: str) -> Callable[[type[AnswerFormat]], type[AnswerFormat]]:
    """Register a format under a name."""

    def register(form: type[AnswerFormat]) -> type[AnswerFormat]:
        form.name = name
        _FORMATS[name] = form
        return form

    return register


def format_names() -> tuple[str, ...]:
    """The names of all forms."""
    return tuple(_FORMATS)


def format_of(template: str, name: str | None = None) -> type[AnswerFormat]:
    """The format of a model's tool calls: the named one, or the one that its chat template shows.

    Raises HeteroKVError for an unknown name.
    """
    if name is not None:
        if name not in _FORMATS:
            raise HeteroKVError(f"tool calls have no form {name!r}; give one of {', '.join(_FORMATS)}")
        return _FORMATS[name]
    return next((form for form in _FORMATS.values() if re.search(form.shown_by, template)), _FORMATS["llama"])


class AnswerFormat(ABC):
    """Reads one answer. A subclass is the format of a model family.

    Args:
        reader: the answer's text.
        writer: receives its parts.
        tools: the functions of the request, name -> JSON schema of the parameters; if empty, nothing is a call.
        thought: the markers around thoughts.
        opens_thought: whether the prompt ends within a thought.

    Attributes:
        name: its name.
        shown_by: a regular expression that matches chat templates of this format and no other.
        markers: texts that are control tokens if the tokenizer has them.
        openers: the markers that begin calls.
    """

    name: ClassVar[str]
    shown_by: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    openers: ClassVar[tuple[str, ...]]

    def __init__(
        self, reader: Reader, writer: EventWriter, tools: Mapping[str, Mapping[str, Any]], thought: tuple[str, str],
        opens_thought: bool,
    ) -> None:  # fmt: skip
        self.reader, self.writer, self.tools = reader, writer, tools
        self._thought, self._opens_thought = thought, opens_thought

    @classmethod
    def all_markers(cls, has_tools: bool) -> tuple[str, ...]:
        """The markers besides those of thoughts, for a request with or without tools."""
        return cls.markers if has_tools else ()

    def read(self) -> Reading:
        """Read the answer to its end."""
        opened, _ = map(self.reader.mark, self._thought)
        if self._opens_thought:
            yield from self._read_thought()
        else:
            space = yield from self.reader.space()
            if (yield from self.reader.accept(opened)):
                yield from self._read_thought()
            else:
                self.writer.content(space)
        openers = tuple(map(self.reader.mark, self.openers)) if self.tools else ()
        thoughts = (opened,) if self.reader.is_control(self._thought[0]) else ()
        if self.tools:
            yield from self._attempt(self.read_beginning)
        while True:
            found = yield from self.reader.until(*openers, *thoughts, emit=self.writer.content)
            if found is None:
                return
            if found in thoughts:
                yield from self._read_thought()
                continue
            self.reader.taken = found
            yield from self._attempt(lambda: self.read_calls(found))  # noqa: B023 (called at once)

    def _read_thought(self) -> Reading:
        closed = self.reader.mark(self._thought[1])
        # A call within a thought ends it, if it cannot be quoted: models forget to close it.
        openers = [self.reader.mark(opener) for opener in self.openers if self.reader.is_control(opener)]
        found = yield from self.reader.until(closed, *(openers if self.tools else ()), emit=self.writer.reasoning)
        self.writer.end_thought()
        if found is not None and found != closed:
            self.reader.taken = found
            yield from self._attempt(lambda: self.read_calls(found))

    def _attempt(self, read: Callable[[], Reading]) -> Reading:
        try:
            yield from read()
        except MalformedError:
            self.writer.fail()
        self.reader.taken = ""

    def read_beginning(self) -> Reading:
        """Read a call that begins the answer, without a marker. Raises MalformedError for text that is no call."""
        self.reader.taken = ""
        return
        yield

    @abstractmethod
    def read_calls(self, opener: str) -> Reading:
        """Read the calls after an opener. Raises MalformedError for text that is no call."""

    @classmethod
    @abstractmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        """The parts of a call, for a grammar.

        Args:
            name: the tool's.
            schema: JSON schema of its parameters, an object.
        """

    #: The texts between parallel calls, before the first and after the last.
    between: ClassVar[Sequence[Part] | None] = None
    before: ClassVar[Sequence[Part]] = ()
    after: ClassVar[Sequence[Part]] = ()
