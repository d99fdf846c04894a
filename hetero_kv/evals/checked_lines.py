"""Lines of results with a checksum each, which reveals edits and damage."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

#: The deepest nesting of lists and objects that is read; results and samples have fewer than ten levels.
MOST_DEPTH = 64

_CHECKSUM = re.compile(r', "checksum": "([0-9a-f]{16})"\}')
_CHECKSUM_LENGTH = len(', "checksum": ""}') + 16


def with_checksum(line: str) -> str:
    """A JSON object on one line, with its checksum as the last field."""
    return f'{line[:-1]}, "checksum": "{_checksum(line)}"}}'


def without_checksum(line: str, *, is_required: bool) -> str:
    """The line before `with_checksum`.

    Args:
        is_required: whether a line must have a checksum; folders of earlier versions have lines without.

    Raises ValueError if the checksum is missing or does not match the line.
    """
    found = _CHECKSUM.fullmatch(line, max(0, len(line) - _CHECKSUM_LENGTH))
    if found is None:
        if is_required or '"checksum"' in line[-2 * _CHECKSUM_LENGTH :]:
            raise ValueError("it has no checksum")
        return line
    bare = line[: found.start()] + "}"
    if _checksum(bare) != found[1]:
        raise ValueError("its checksum does not match: it was changed after it was written")
    return bare


def _checksum(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, or is nested more than `MOST_DEPTH` deep."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    _require_depth(value, MOST_DEPTH)
    return value


def _require_depth(value: Any, levels: int) -> None:
    if not isinstance(value, list | dict):
        return
    if not levels:
        raise ValueError("nested too deep")
    for each in value.values() if isinstance(value, dict) else value:
        _require_depth(each, levels - 1)
