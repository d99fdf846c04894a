"""Tool calls of Qwen3-Coder: `<function=name>` and `<parameter=name>` between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.serving.answers.answer_format import AnswerFormat, registered
from hetero_kv.serving.answers.call_grammar import Marker, Part, typed_parts
from hetero_kv.serving.answers.hermes import BEGIN, END
from hetero_kv.serving.answers.reader import MalformedError, Reading
from hetero_kv.serving.answers.typed_arguments import TypedArguments

_FUNCTION, _PARAMETER = "<function=", "<parameter="


@registered("qwen_coder")
class QwenCoder(AnswerFormat):
    """Reads `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    The tool's schema says whether a value is text or JSON. These models sometimes omit `<tool_call>`: such a call
    counts if its tool is known.
    """

    shown_by = r"<function="
    markers = (BEGIN, END)
    openers = (BEGIN, _FUNCTION)
    between = ("\n",)

    def read_calls(self, opener: str) -> Reading:
        reader, writer = self.reader, self.writer
        if opener != _FUNCTION:
            yield from reader.space()
            yield from reader.expect(_FUNCTION)
        name, _ = yield from reader.collected(">")
        if not name or "\n" in name or (opener == _FUNCTION and name not in self.tools):
            raise MalformedError
        writer.begin(name)
        arguments = TypedArguments(reader, writer, self.tools.get(name, {}))
        while True:
            yield from reader.space()
            if (yield from reader.expect("</function>", _PARAMETER)) == "</function>":
                break
            key, _ = yield from reader.collected(">")
            yield from reader.accept("\n")
            yield from arguments.read(key, "\n</parameter>", "</parameter>")
        arguments.end()
        writer.end()
        yield from reader.space()
        yield from reader.accept(reader.mark(END))

    @classmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        parts: list[Part] = [Marker(BEGIN), f"\n<function={name}>\n"]
        parts += typed_parts(schema, lambda key: [f"<parameter={key}>\n"], "\n</parameter>\n")
        return [*parts, "</function>\n", Marker(END)]
