"""Answers of gpt-oss: messages in channels; `commentary` has tool calls, `analysis` thoughts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.serving.answers.answer_format import AnswerFormat, registered
from hetero_kv.serving.answers.call_grammar import FreeText, JsonValue, Marker, Maybe, Part
from hetero_kv.serving.answers.json_reading import read_object
from hetero_kv.serving.answers.reader import Reading

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"\bto=functions\.([\w.:-]+)")
_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")


@registered("harmony")
class Harmony(AnswerFormat):
    """Reads messages, each `<|channel|>name<|message|>text<|end|>`; the next one begins with `<|start|>assistant`.

    `final`, and `commentary` that is no call, are content. A call's header has `to=functions.name`.
    """

    shown_by = r"<\|channel\|>"
    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN)
    openers = ()
    before = (
        Maybe(
            (Marker(_CHANNEL), "analysis", Marker(_MESSAGE), FreeText(Marker(_END)), Marker(_START), "assistant"),
        ),
    )

    @classmethod
    def all_markers(cls, has_tools: bool) -> tuple[str, ...]:
        return cls.markers

    def read(self) -> Reading:
        reader = self.reader
        start, channel, message = map(reader.mark, (_START, _CHANNEL, _MESSAGE))
        ends = tuple(map(reader.mark, (_END, _CALL, _RETURN)))
        # An answer without a header, which the prompt may have, is content.
        while (found := (yield from reader.until(start, channel, *ends, emit=self.writer.content))) is not None:
            if found in ends:
                continue
            parts: list[str] = []
            reader.taken = found
            if (yield from reader.until(message, emit=parts.append)) is None:
                self.writer.fail()
                return
            header = reader.plain(found) + "".join(parts)
            recipient, name = _RECIPIENT.search(header), _NAME.search(header)
            if recipient is not None and self.tools:
                self.writer.end_thought()
                yield from self._attempt(lambda: self.read_calls(recipient[1]))  # noqa: B023 (called at once)
                continue
            reader.taken = ""
            is_thought = name is not None and name[1] == "analysis"
            if is_thought:
                self.writer.begin_thought()
            else:
                self.writer.end_thought()
                self.writer.begin_message()
            emit = self.writer.reasoning if is_thought else self.writer.content
            if (yield from reader.until(*ends, emit=emit)) is None:
                return

    def read_calls(self, opener: str) -> Reading:
        """Read the arguments of a call; `opener` is the tool's name, from its header."""
        self.writer.begin(opener)
        yield from self.reader.space()
        yield from read_object(self.reader, self.writer.arguments)
        self.writer.end()

    @classmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        head: list[Part] = [
            Marker(_CHANNEL),
            f"commentary to=functions.{name} ",
            Marker(_CONSTRAIN),
            "json",
            Marker(_MESSAGE),
        ]
        return [*head, JsonValue(schema), Marker(_CALL)]
