"""Tool calls of GLM 4: keys and values one by one, between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.serving.answers.answer_format import AnswerFormat, registered
from hetero_kv.serving.answers.call_grammar import Marker, Part, typed_parts
from hetero_kv.serving.answers.hermes import BEGIN, END
from hetero_kv.serving.answers.reader import MalformedError, Reading
from hetero_kv.serving.answers.typed_arguments import TypedArguments

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


@registered("glm")
class Glm(AnswerFormat):
    """Reads `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with line ends or without.

    The tool's schema says whether a value is text or JSON.
    """

    shown_by = r"<arg_key>"
    markers = (BEGIN, END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    openers = (BEGIN,)
    between = ("\n",)

    def read_calls(self, opener: str) -> Reading:
        reader, writer = self.reader, self.writer
        key_begin, end = reader.mark(_KEY), reader.mark(END)
        yield from reader.space()
        name, found = yield from reader.collected("\n", key_begin, end)
        name = name.strip()
        if not name or "{" in name:
            raise MalformedError
        writer.begin(name)
        arguments = TypedArguments(reader, writer, self.tools.get(name, {}))
        while found != end:
            if found != key_begin:
                yield from reader.space()
                if (yield from reader.expect(key_begin, end)) == end:
                    break
            key, _ = yield from reader.collected(reader.mark(_KEY_END))
            yield from reader.space()
            yield from reader.expect(reader.mark(_VALUE))
            yield from arguments.read(key.strip(), reader.mark(_VALUE_END))
            found = ""
        arguments.end()
        writer.end()

    @classmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        return [Marker(BEGIN), f"{name}\n", *typed_parts(schema, _opened, Marker(_VALUE_END), "\n"), Marker(END)]


def _opened(key: str) -> list[Part]:
    return [Marker(_KEY), key, Marker(_KEY_END), "\n", Marker(_VALUE)]
