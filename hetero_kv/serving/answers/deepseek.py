# ruff: noqa: RUF001 (the control tokens have these letters)
"""Tool calls of DeepSeek V3, R1 and V3.1, between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.serving.answers.answer_format import AnswerFormat, registered
from hetero_kv.serving.answers.call_grammar import JsonValue, Marker, Part
from hetero_kv.serving.answers.json_reading import read_object
from hetero_kv.serving.answers.reader import MalformedError, Reading

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class _DeepSeek(AnswerFormat):
    """Reads both forms of `<｜tool▁calls▁begin｜>`."""

    markers = (_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR)
    openers = (_BEGIN, _CALL)
    before = (Marker(_BEGIN),)
    after = (Marker(_END),)

    def read_calls(self, opener: str) -> Reading:
        reader, writer = self.reader, self.writer
        begin, end, separator = map(reader.mark, (_CALL, _END, _SEPARATOR))
        is_within, has_called = opener == begin, False
        while True:
            if not is_within:
                yield from reader.space()
                if not (yield from reader.accept(begin)):
                    if not has_called:
                        raise MalformedError
                    yield from reader.accept(end)
                    return
            is_within = False
            name, _ = yield from reader.collected(separator)
            is_fenced = name.strip() == "function"
            if is_fenced:
                name, _ = yield from reader.collected("\n")
                yield from reader.expect("```json\n", "```json")
            if not name.strip():
                raise MalformedError
            writer.begin(name.strip())
            yield from reader.space()
            yield from read_object(reader, writer.arguments)
            writer.end()
            reader.taken, has_called = "", True
            yield from reader.space()
            if is_fenced:
                yield from reader.accept("```")
            yield from reader.accept(reader.mark(_CALL_END))


@registered("deepseek")
class DeepSeek(_DeepSeek):
    """Calls of V3 and R1: "function", `<｜tool▁sep｜>`, the name, and the arguments in a fence."""

    shown_by = r"(?s)tool▁call▁begin.*```json"
    between = ("\n",)

    @classmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        head: list[Part] = [Marker(_CALL), "function", Marker(_SEPARATOR), f"{name}\n```json\n"]
        return [*head, JsonValue(schema), "\n```", Marker(_CALL_END)]


@registered("deepseek_v31")
class DeepSeekV31(_DeepSeek):
    """Calls of V3.1: the name, `<｜tool▁sep｜>` and the arguments."""

    shown_by = r"(?s)^(?!.*tool▁call▁begin.*```json).*tool▁call▁begin"
    between = ()

    @classmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        return [Marker(_CALL), name, Marker(_SEPARATOR), JsonValue(schema), Marker(_CALL_END)]
