"""JSON responses that any text fits into."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


class Json(Response):
    """A JSON response; parts of characters, which UTF-8 has no bytes for, become question marks."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """See starlette."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Json:
    """A response with a JSON value."""
    return Json(content, status, dict(headers or {}))
