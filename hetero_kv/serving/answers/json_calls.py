"""Reads tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Generator

from hetero_kv.serving.answers.json_reading import read_object, read_text, read_whole
from hetero_kv.serving.answers.reader import MalformedError, Reader, Reading
from hetero_kv.serving.answers.writing import EventWriter

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type")


def read_call(reader: Reader, writer: EventWriter, *, is_known: bool) -> Reading:
    """Emit a call {"name": …, "arguments": {…}}; the key of the arguments may also be "parameters".

    If the name comes before the arguments, the call begins with the first argument.

    Args:
        reader: before the object.
        writer: receives the call.
        is_known: whether only an object of this form that names a tool of the request counts as a call, as is the rule
            without a marker.

    Raises MalformedError for text that is no call.
    """
    name, arguments = yield from _read_members(reader, writer, is_known=is_known)
    if name is None:
        raise MalformedError
    if arguments is not None:
        writer.begin(name)
        writer.arguments(arguments)
    writer.end()


def _read_members(
    reader: Reader, writer: EventWriter, *, is_known: bool
) -> Generator[None, None, tuple[str | None, str | None]]:
    """The name, and the arguments unless they were already emitted."""
    name, arguments = None, "{}"
    has_begun = False
    yield from reader.space()
    yield from reader.expect("{")
    yield from reader.space()
    if (yield from reader.accept("}")):
        raise MalformedError
    while True:
        key = yield from read_text(reader)
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        first = yield from reader.peek()
        if key == "name" and name is None:
            name = yield from read_text(reader)
            if not name or (is_known and name not in writer.names):
                raise MalformedError
        elif key in _ARGUMENTS and first == "{" and name is not None and not has_begun:
            writer.begin(name)
            has_begun = True
            yield from read_object(reader, writer.arguments)
        elif key in _ARGUMENTS and not has_begun:
            arguments = _object((yield from read_whole(reader)))
        elif key == "function" and first == "{" and name is None:
            name, within = yield from _read_members(reader, writer, is_known=is_known)
            has_begun = within is None
            arguments = within or arguments
        elif is_known and key not in _OTHERS:
            raise MalformedError
        else:
            yield from read_whole(reader)
        yield from reader.space()
        if (yield from reader.expect(",", "}")) == "}":
            return name, None if has_begun else arguments
        yield from reader.space()


def _object(text: str) -> str:
    """The JSON text of arguments, which may be given as null, or as a string with that text."""
    value = json.loads(text)
    if value is None:
        return "{}"
    if isinstance(value, str):
        try:
            text, value = value, json.loads(value)
        except ValueError as error:
            raise MalformedError from error
    if not isinstance(value, dict):
        raise MalformedError
    return text
