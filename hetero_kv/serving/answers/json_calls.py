"""Reads tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Generator

from hetero_kv.serving.answers.json_reading import read_object, read_text, read_whole
from hetero_kv.serving.answers.reader import MalformedError, Reader, Reading
from hetero_kv.serving.answers.writing import Writer

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type")


def read_call(reader: Reader, writer: Writer, *, is_known: bool) -> Reading:
    """Pass on a call {"name": …, "arguments": {…}}, whose arguments may also be called "parameters".

    The call begins with the first of its arguments, if the name stands before them.

    Args:
        reader: before the object.
        writer: takes the call.
        is_known: whether an object of another form is no call, and neither is one of a tool that the request lacks, as
            where no marker says that it is one.

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
    reader: Reader, writer: Writer, *, is_known: bool
) -> Generator[None, None, tuple[str | None, str | None]]:
    """The name, and the arguments unless they were passed on."""
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
    """The JSON text of arguments: they may be null, or a string with that text."""
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
