"""A strict streaming reader of JSON: the text emitted so far is always a prefix of a JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from hetero_kv.serving.answers.reader import MalformedError, Reader, Reading

#: The deepest nesting of arrays and objects.
DEEPEST = 64
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_SCALAR = re.compile(r"[-+.\w]*")
_LITERAL = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")

Emit = Callable[[str], object]


def read_value(reader: Reader, emit: Emit, levels: int = DEEPEST) -> Reading:
    """Emit a JSON value as the model writes it, but with line ends in its strings, which JSON forbids, escaped.

    Raises MalformedError where the text is no JSON, or ends.
    """
    first = yield from reader.peek()
    if first == '"':
        yield from _read_string(reader, emit)
    elif first and first in "{[":
        yield from _read_items(reader, emit, levels)
    else:
        text = ""
        while True:
            found = _SCALAR.match(reader.waiting)
            assert found is not None
            text += reader.take(found.end())
            if reader.waiting or reader.is_over:
                break
            yield
        if not _LITERAL.fullmatch(text):
            raise MalformedError
        emit(text)


def read_text(reader: Reader) -> Generator[None, None, str]:
    """The text of a JSON string. Raises MalformedError if there is none."""
    parts: list[str] = []
    yield from _read_string(reader, parts.append)
    return str(json.loads("".join(parts)))


def read_whole(reader: Reader) -> Generator[None, None, str]:
    """The text of a JSON value. Raises MalformedError if there is none."""
    parts: list[str] = []
    yield from read_value(reader, parts.append)
    return "".join(parts)


def read_object(reader: Reader, emit: Emit) -> Reading:
    """As `read_value`, but only for an object."""
    if (yield from reader.peek()) != "{":
        raise MalformedError
    yield from read_value(reader, emit)


def _read_items(reader: Reader, emit: Emit, levels: int) -> Reading:
    if not levels:
        raise MalformedError
    opened = reader.take(1)
    closed = "}" if opened == "{" else "]"
    emit(opened)
    emit((yield from reader.space()))
    if (yield from reader.accept(closed)):
        emit(closed)
        return
    while True:
        if opened == "{":
            yield from _read_string(reader, emit)
            emit((yield from reader.space()))
            emit((yield from reader.expect(":")))
            emit((yield from reader.space()))
        yield from read_value(reader, emit, levels - 1)
        emit((yield from reader.space()))
        found = yield from reader.expect(",", closed)
        emit(found)
        if found == closed:
            return
        emit((yield from reader.space()))


def _read_string(reader: Reader, emit: Emit) -> Reading:
    emit((yield from reader.expect('"')))
    while True:
        following = yield from reader.peek()
        if not following:
            raise MalformedError
        if found := _PLAIN.match(reader.waiting):
            emit(reader.take(found.end()))
        elif following == '"':
            emit(reader.take(1))
            return
        elif following == "\\":
            escape = yield from reader.expect(*(f"\\{character}" for character in '"\\/bfnrtu'))
            if escape == "\\u":
                while len(reader.waiting) < 4 and not reader.is_over:
                    yield
                digits = reader.take(4)
                if not _HEX.fullmatch(digits):
                    raise MalformedError
                escape += digits
            emit(escape)
        else:
            # A control character, or a control token that the model writes as a word.
            emit(json.dumps(reader.plain(reader.take(1)), ensure_ascii=False)[1:-1])
