"""JSON values that come from outside: their check, and the texts in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hetero_kv.errors import HeteroKVError, shown

#: The most lists and mappings in each other.
DEEPEST = 64


def checked_json(value: Any, what: str) -> str:
    """A value's JSON text.

    Raises HeteroKVError, which begins with `what`, for one that has none or is nested more than `DEEPEST` deep.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        parsed = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise HeteroKVError(f"{what} that are no JSON: {error}; give JSON") from error
    if is_deeper(parsed, DEEPEST):
        raise HeteroKVError(f"{what} that are nested more than {DEEPEST} deep; give flatter ones")
    return text


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and mappings are nested more than `levels` deep in a value."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(part, levels - 1) for part in parts)


def optional_text(mapping: Mapping[str, Any], key: str, place: str) -> str:
    """The text of a key that may be missing or None; "" then.

    Raises HeteroKVError for another value.
    """
    value = mapping.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise HeteroKVError(f"{place} has the {key} {shown(value, 80)}; give a text")
    return value


def texts_of(value: Any) -> Iterator[str]:
    """All texts of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)
