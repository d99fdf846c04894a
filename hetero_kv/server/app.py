"""The ASGI application of a server."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib import metadata

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hetero_kv.server import (
    anthropic,
    attended_routes,
    chat,
    completions,
    file_routes,
    llama_server,
    page_routes,
    responses,
)
from hetero_kv.server.errors import ApiError, error_body
from hetero_kv.server.guard import CLIENT_GONE, Guard
from hetero_kv.server.host import Host, failure
from hetero_kv.server.json_response import json_response
from hetero_kv.server.streaming import ClientGoneError

ROUTERS = (
    chat.router,
    responses.router,
    anthropic.router,
    completions.router,
    attended_routes.router,
    file_routes.router,
    llama_server.router,
    page_routes.router,
)


def application(host: Host, *, origins: Collection[str] = ()) -> FastAPI:
    """The application that answers for a host.

    Args:
        origins: other origins whose pages may use the server; "*" for all.
    """

    app = FastAPI(title="hetero-kv", version=metadata.version("hetero-kv"), docs_url=None, redoc_url=None)
    app.state.host = host
    for router in ROUTERS:
        app.include_router(router)
    # The guard handles other methods.
    for kind in (ApiError, ValueError, MemoryError, RuntimeError):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(ClientGoneError, _gone)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_middleware(Guard, keys=host.keys, settings=host.settings, metrics=host.metrics, origins=origins)
    return app


def _respond(error: ApiError, request: Request) -> Response:
    return json_response(error_body(error, request.url.path), error.status, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return _respond(failure(error, request), request)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if first["loc"] == ("body",) and not re.fullmatch(r"application/(.+\+)?json", kind):
        reason = f"the body's Content-Type is {kind or 'missing'}; send JSON with Content-Type: application/json"
        return _respond(ApiError(415, reason, code="unsupported_media_type"), request)
    place = [str(part) for part in first["loc"] if part != "body"]
    field = place[0] if place else None
    if first["type"] == "json_invalid":
        fault = first.get("ctx", {}).get("error", first["msg"])
        reason = f"the body is no JSON: {fault} at character {first['loc'][-1]}; send one JSON object"
        return _respond(ApiError(400, reason, code="invalid_json"), request)
    # A field of several types has a fault for each of them, whose place names the type.
    faults = [each["msg"] for each in error.errors() if each["loc"][1:2] == first["loc"][1:2]]
    where = ".".join(place) if len(faults) == 1 else field
    return _respond(
        ApiError(400, f"{where or 'the body'}: {'; or: '.join(dict.fromkeys(faults))}", param=field), request
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        400: "the body cannot be read; send JSON in UTF-8, nested less deep and with shorter numbers",
        404: f"there is no route {request.url.path}; docs/server.md lists them",
        405: f"{request.method} is not a method of {request.url.path}",
    }
    text = messages.get(error.status_code, str(error.detail))
    response = _respond(ApiError(error.status_code, text), request)
    response.headers.update(error.headers or {})
    return response
