"""Tool calls of Llama 3, and of models with an unknown format: a JSON object as the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.serving.answers.answer_format import AnswerFormat, registered
from hetero_kv.serving.answers.call_grammar import JsonValue, Part
from hetero_kv.serving.answers.json_calls import read_call
from hetero_kv.serving.answers.reader import MalformedError, Reading

_TAG = "<|python_tag|>"


@registered("llama")
class Llama(AnswerFormat):
    """Reads {"name": …, "parameters": {…}} as the whole answer or after `<|python_tag|>`, and further ones after `;`.

    Without a marker, an object is a call only if it names one of the request's tools.
    """

    shown_by = r"<\|python_tag\|>|\"parameters\": '"
    markers = openers = (_TAG,)
    between = ("; ",)

    def read_beginning(self) -> Reading:
        self.reader.taken = ""
        if (yield from self.reader.peek()) == "{":
            yield from self._read(is_known=True)

    def read_calls(self, opener: str) -> Reading:
        yield from self._read(is_known=False)

    def _read(self, *, is_known: bool) -> Reading:
        while True:
            yield from read_call(self.reader, self.writer, is_known=is_known)
            self.reader.taken = ""
            yield from self.reader.space()
            if not (yield from self.reader.accept(";")):
                if (yield from self.reader.peek()) != "{":
                    self.writer.content(self.reader.taken)
                    return
                is_known = True
            yield from self.reader.space()
            if (yield from self.reader.peek()) != "{":
                raise MalformedError

    @classmethod
    def call_parts(cls, name: str, schema: Mapping[str, Any]) -> Sequence[Part]:
        return [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ', JsonValue(schema), "}"]
