"""Tool calls of Mistral: after `[TOOL_CALLS]`, a JSON array, or a name, `[ARGS]` and a JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.serving.answers.answer_format import AnswerFormat, registered
from hetero_kv.serving.answers.call_grammar import JsonValue, Marker, Part
from hetero_kv.serving.answers.json_calls import read_call
from hetero_kv.serving.answers.json_reading import read_object
from hetero_kv.serving.answers.reader import MalformedError, Reading

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class _Mistral(AnswerFormat):
    """Reads both forms of `[TOOL_CALLS]`."""

    markers = (_CALLS, _ID, _ARGUMENTS)
    openers = (_CALLS,)

    def read_calls(self, opener: str) -> Reading:
        reader, writer = self.reader, self.writer
        yield from reader.space()
        if not (yield from reader.accept("[")):
            identifier, arguments = reader.mark(_ID), reader.mark(_ARGUMENTS)
            name, found = yield from reader.collected(identifier, arguments, "\n")
            if found == identifier:
                _, found = yield from reader.collected(arguments)
            if found != arguments or not name.strip():
                raise MalformedError
            writer.begin(name.strip())
            yield from reader.space()
            yield from read_object(reader, writer.arguments)
            writer.end()
            return
        while True:
            yield from read_call(reader, writer, is_known=False)
            reader.taken = ""
            yield from reader.space()
            if (yield from reader.expect(",", "]")) == "]":
                return


@registered("mistral_args")
class MistralArgs(_Mistral):
    """Calls of tokenizers since version 11: `[TOOL_CALLS]name[ARGS]{…}`, once for each call."""

    shown_by = r"\[ARGS\]"
    between = ()

    @classmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        return [Marker(_CALLS), name, Marker(_ARGUMENTS), JsonValue(schema)]


@registered("mistral")
class Mistral(_Mistral):
    """Calls of tokenizers before version 11: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`."""

    shown_by = r"(?s)^(?!.*\[ARGS\]).*\[TOOL_CALLS\]"
    before = (Marker(_CALLS), " [")
    between = (", ",)
    after = ("]",)

    @classmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        return [f'{{"name": "{name}", "arguments": ', JsonValue(schema), "}"]
