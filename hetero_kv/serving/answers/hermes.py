"""Tool calls of Hermes, Qwen 2.5 and Qwen 3: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.serving.answers.answer_format import AnswerFormat, registered
from hetero_kv.serving.answers.call_grammar import JsonValue, Marker, Part
from hetero_kv.serving.answers.json_calls import read_call
from hetero_kv.serving.answers.reader import Reading

BEGIN, END = "<tool_call>", "</tool_call>"


@registered("hermes")
class Hermes(AnswerFormat):
    """Reads `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or such an object as the whole answer."""

    shown_by = r"(?s)^(?!.*(<arg_key>|<function=)).*<tool_call>"
    markers = (BEGIN, END)
    openers = (BEGIN,)
    between = ("\n",)

    def read_beginning(self) -> Reading:
        # Small models omit the markers.
        self.reader.taken = ""
        if (yield from self.reader.peek()) == "{":
            yield from read_call(self.reader, self.writer, is_known=True)

    def read_calls(self, opener: str) -> Reading:
        yield from read_call(self.reader, self.writer, is_known=False)
        yield from self.reader.space()
        yield from self.reader.accept(self.reader.mark(END))

    @classmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        head = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        return [Marker(BEGIN), head, JsonValue(schema), "}\n", Marker(END)]
