"""JSON responses for any text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


class Json(Response):
    """A JSON response; parts of characters, which UTF-8 cannot encode, become question marks."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """See starlette."""
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    """A JSON value in UTF-8; numbers that JSON cannot express become null."""
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(content), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Json:
    """A response with a JSON value."""
    return Json(content, status, dict(headers or {}))
