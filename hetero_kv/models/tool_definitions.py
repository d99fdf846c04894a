"""Reads definitions of tools in the form of OpenAI's API, and replaces the texts in them for templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.models.json_values import checked_json, optional_text

#: As in OpenAI's API, mappings: {"type": "function", "function": {"name": …, "description": …, "parameters": …}}.
Tools = Sequence[Mapping[str, Any]]


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """The functions of OpenAI's tools, each with "name" and, where given, "description", "parameters" and others.

    Raises HeteroKVError for tools that are no functions, or of another form.
    """
    if tools is None:
        return []
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise HeteroKVError(f"tools is {shown(tools, 80)}; give a list of functions")
    read: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise HeteroKVError(f"{place} has the type {shown(kind, 80)}; the model can be given functions alone")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise HeteroKVError(f'{place} has the function {shown(function, 80)}; give {{"name": …, "parameters": …}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise HeteroKVError(f"{place} has the name {shown(name, 80)}; give the function's name")
        if name in read:
            raise HeteroKVError(f"{place} has the name {shown(name, 80)} of another tool; give each its own")
        optional_text(function, "description", place)
        if parameters is not None and not isinstance(parameters, Mapping):
            raise HeteroKVError(f"{place} has the parameters {shown(parameters, 80)}; give a JSON schema")
        text = checked_json({key: value for key, value in function.items() if value is not None}, f"{place} has values")
        read[name] = json.loads(text)
    return list(read.values())


def completed(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function with the description and parameters that it lacks."""
    return {
        "name": function["name"],
        "description": "",
        "parameters": {"type": "object", "properties": {}},
        **function,
    }


# Words of JSON schema and of OpenAI's functions, which templates look for; the texts of people are their values.
_KEYWORD = re.compile(
    r"name|description|parameters|strict|type|properties|required|items|prefixItems|enum|const|default|examples|title|"
    r"format|pattern|anyOf|oneOf|allOf|not|\$ref|\$defs|definitions|\$schema|\$id|additionalProperties|"
    r"patternProperties|minimum|maximum|exclusiveMinimum|exclusiveMaximum|multipleOf|minLength|maxLength|minItems|"
    r"maxItems|uniqueItems|minProperties|maxProperties|nullable|response|return"
)
_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null", "any")
# Their keys are names that people give.
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
# Their values are data.
_DATA = ("enum", "const", "default", "examples", "required")


def with_stand_ins(
    value: Any, stand_in: Callable[[str], str], *, is_schema: bool = False, is_named: bool = False
) -> Any:
    """A JSON value whose texts are replaced, keys included.

    Args:
        value: the value.
        stand_in: gives the stand-in of a text.
        is_schema: whether it is a function or a JSON schema, in which keywords and types stay.
        is_named: whether it is a mapping of names to schemas.
    """
    if isinstance(value, str):
        return stand_in(value)
    if isinstance(value, list):
        return [with_stand_ins(each, stand_in, is_schema=is_schema) for each in value]
    if not isinstance(value, dict):
        return value
    replaced = {}
    for key, each in value.items():
        is_keyword = is_schema and not is_named and bool(_KEYWORD.fullmatch(key))
        kinds = each if isinstance(each, list) else [each]
        if is_keyword and key == "type" and all(kind in _TYPES for kind in kinds):
            replaced[key] = each
            continue
        replaced[key if is_keyword else stand_in(key)] = with_stand_ins(
            each,
            stand_in,
            is_schema=is_schema and (is_named or (is_keyword and key not in _DATA)),
            is_named=is_keyword and key in _NAMED,
        )
    return replaced
