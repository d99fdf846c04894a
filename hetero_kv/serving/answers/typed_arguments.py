"""Reads arguments that a model writes one by one, as text or JSON, into one JSON object."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

from hetero_kv.serving.answers.reader import MalformedError, Reader
from hetero_kv.serving.answers.writing import EventWriter

# Models also write Python's spelling of these values.
_PRINTED = {"True": "true", "False": "false", "None": "null"}


class TypedArguments:
    """Writes the arguments of a call as JSON, by the types in the tool's schema.

    Args:
        reader: the answer.
        writer: receives the parts of the JSON object.
        schema: the tool's parameters; {} if unknown.
    """

    def __init__(self, reader: Reader, writer: EventWriter, schema: Mapping[str, Any]) -> None:
        self._reader, self._writer = reader, writer
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._keys: set[str] = set()

    def read(self, key: str, *ends: str) -> Generator[None, None, None]:
        """Read the value of an argument, up to one of the ends. Text is emitted as it arrives, other values whole.

        Raises MalformedError if the answer ends before, and for a repeated argument.
        """
        if key in self._keys:
            raise MalformedError
        self._writer.arguments(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys.add(key)
        kinds = _kinds(self._properties.get(key))
        if kinds == {"string"}:
            self._writer.arguments('"')
            found = yield from self._reader.until(*ends, emit=self._write_text)
            if found is None:
                raise MalformedError
            self._writer.arguments('"')
        else:
            text, _ = yield from self._reader.collected(*ends)
            self._writer.arguments(_json(text, kinds))

    def end(self) -> None:
        """End the arguments."""
        self._writer.arguments("}" if self._keys else "{}")

    def _write_text(self, text: str) -> None:
        self._writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    values = [*schema["enum"]] if isinstance(schema.get("enum"), list) else []
    values += [schema["const"]] if "const" in schema else []
    if values:
        return set().union(*map(_kinds_of, values))
    within = [_kinds(each) for key in ("anyOf", "oneOf") for each in schema.get(key) or ()]
    return set().union(*within) if all(within) else set()


def _kinds_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, dict):
        return {"object"}
    return {{str: "string", float: "number", list: "array"}.get(type(value), "null")}


def _json(text: str, kinds: set[str]) -> str:
    """The text itself if it is a JSON value of a type that the schema allows, or else the text as a JSON string."""
    whole = text.strip()
    whole = _PRINTED.get(whole, whole)
    try:
        value = json.loads(whole)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    # The model writes strings without quotes, so quotes are part of the text.
    is_allowed = not isinstance(value, str) and (not kinds or kinds & _kinds_of(value))
    return whole if is_allowed else json.dumps(text, ensure_ascii=False)
