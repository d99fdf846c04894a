"""Errors of a request, in each API's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import HeteroKVError, OutOfMemoryError, is_out_of_memory

# OpenAI's and Anthropic's names of errors by HTTP status.
_OPENAI = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


@dataclass
class ApiError(HeteroKVError):
    """A request that cannot be answered.

    Attributes:
        status: the HTTP status.
        param: the field at fault; None for the request as a whole.
        code: a word for programs, such as "context_length_exceeded".
        retry_after_s: seconds after which the same request may succeed.
        details: further fields of OpenAI's form.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return headers if self.retry_after_s is None else {"retry-after": str(max(1, round(self.retry_after_s)))}


def api_error(error: BaseException) -> ApiError:
    """The error of a request, from one that the engine or the package raised.

    Mistakes of the caller are 400, lack of memory 503, and bugs of the server 500, without their texts.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CacheFullError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, OutOfMemoryError) or is_out_of_memory(error):
        return ApiError(503, f"the server has too little memory for the request: {error}", code="out_of_memory")
    if isinstance(error, HeteroKVError):
        return ApiError(400, str(error))
    return ApiError(500, f"the server failed ({type(error).__name__}); its log says how", code="internal_error")


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The JSON of an error in the form of the API to which `path` belongs."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    kind = _OPENAI.get(error.status, "invalid_request_error")
    form = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": {**form, **error.details}}
