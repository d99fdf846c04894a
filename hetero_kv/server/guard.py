"""The guard of every request: limits of size and time, API keys, hosts and origins, and the log of requests."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetero_kv.server.errors import ApiError, api_error, error_body
from hetero_kv.server.json_response import json_response
from hetero_kv.server.keys import Keys
from hetero_kv.server.metrics import Metrics
from hetero_kv.server.settings import ServerSettings

_logger = logging.getLogger(__name__)
_HEADERS = re.compile(r"[\w, -]{1,500}", re.ASCII)
_REQUEST_ID = re.compile(r"[\w.-]{1,64}")
#: Paths that need no key: the page, which asks for one, and the health check.
_OPEN = ("/health", "/v1/health", "/")
_QUIET = ("/health", "/v1/health", "/metrics", "/slots")
#: The status, in the log and the metrics, of a request whose client left before the whole response; nginx's number.
CLIENT_GONE = 499
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_SECURITY = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


class SlowClientError(Exception):
    """A client does not read its data."""


class Guard:
    """ASGI middleware around the whole application.

    Without API keys a page on another site must not use the server through a visitor's browser: a request must name
    this machine in its `Host` (against DNS rebinding), and an `Origin` must be the server's own or an allowed one.

    Args:
        origins: other origins whose pages may use the server; "*" for all.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, settings: ServerSettings, metrics: Metrics, origins: Collection[str] = ()
    ) -> None:
        self._app, self._keys, self._settings, self._metrics = app, keys, settings, metrics
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":
            # Uvicorn sends the head of the response alone.
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        state = scope.setdefault("state", {})
        state["request_id"], state["key"] = request_id, ""
        began, status, is_whole, has_left = time.perf_counter(), 0, False, False

        async def receive_noting() -> Message:
            nonlocal has_left
            message = await receive()
            # Behind a whole response the server closes the request itself.
            has_left |= message["type"] == "http.disconnect" and not is_whole
            return message

        async def answer(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["x-request-id"] = request_id
                # Anthropic's name for it.
                out["request-id"] = request_id
                for name, value in _SECURITY.items():
                    out.setdefault(name, value)
                self._allow_origin(headers, out)
            # A client that reads nothing would block its answer's place for ever.
            try:
                async with asyncio.timeout(self._settings.write_s):
                    await send(message)
            except TimeoutError:
                raise SlowClientError(f"it took no data for {self._settings.write_s:g} s") from None
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            self._require_host_and_origin(headers)
            if self._is_preflight(scope, headers):
                named = headers.get("access-control-request-headers", "")
                allowed = {"access-control-allow-headers": named} if _HEADERS.fullmatch(named) else {}
                await json_response({}, headers=allowed)(scope, receive, answer)
                return
            is_open = scope["path"] in _OPEN or scope["path"].startswith("/page/")
            if not is_open:
                state["key"] = self._keys.name(headers)
            # Requests without a key have no body.
            body = b"" if is_open else await self._body(headers, receive)
            await self._app(scope, _replayed(body, receive_noting), answer)
        except ApiError as error:
            body_of_error = error_body(error, scope["path"])
            await json_response(body_of_error, error.status, error.headers)(scope, receive, answer)
        except SlowClientError as error:
            has_left = True
            _logger.warning("request_id=%s: the client is gone: %s", request_id, error)
        except Exception as error:
            if status:
                # In the middle of a response only the end of the connection can signal an error.
                raise
            _logger.exception("request_id=%s failed", request_id)
            found = api_error(error)
            await json_response(error_body(found, scope["path"]), found.status, found.headers)(scope, receive, answer)
        finally:
            if has_left:
                status = CLIENT_GONE
            route = getattr(scope.get("route"), "path", None) or ("other" if status in (401, 403, 404, 405) else "/")
            self._metrics.request(route, status)
            # Health checks and scrapes are too frequent for the log.
            level = logging.DEBUG if scope["path"] in _QUIET and status < 400 else logging.INFO
            _logger.log(
                level,
                "request_id=%s key=%s method=%s path=%s status=%d seconds=%.3f%s", request_id, state["key"],
                method, _one_line(scope["path"]), status, time.perf_counter() - began,
                "".join(f" {name}={value}" for name, value in state.get("log", {}).items()),
            )  # fmt: skip

    def _require_host_and_origin(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = _host_name(host)
        is_local = not self._keys and not self._settings.insecure
        if is_local and name not in {*_LOCAL_NAMES, self._settings.host}:
            raise ApiError(
                403, f"the request's Host {host!r} is not this machine; use http://{self._settings.host}, or start the "
                "server with --api_key", code="unknown_host",
            )  # fmt: skip
        origin = headers.get("origin")
        own = {f"http://{host}", f"https://{host}"}
        if is_local and origin is not None and origin not in own | self._origins and "*" not in self._origins:
            raise ApiError(
                403, f"pages of {origin!r} may not use this server; start it with --allow_origin {origin}",
                code="unknown_origin",
            )  # fmt: skip

    def _is_preflight(self, scope: Scope, headers: Headers) -> bool:
        return scope["method"] == "OPTIONS" and "access-control-request-method" in headers

    def _allow_origin(self, headers: Headers, out: MutableHeaders) -> None:
        origin = headers.get("origin")
        if origin is not None and (origin in self._origins or "*" in self._origins):
            out["access-control-allow-origin"] = origin
            out["access-control-expose-headers"] = "x-request-id, x-hetero-kv-ignored, retry-after"
            out["access-control-allow-methods"] = "GET, POST, DELETE, OPTIONS"
            out.append("vary", "origin")

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body of a request. Raises ApiError 413 if it is too large, 408 if it takes too long."""
        most = round(self._settings.body_mb * 1e6)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise _too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.read_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the connection ended within the request")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise _too_large(most)
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408, f"the request did not come whole within {self._settings.read_s:g} s; send it again"
            ) from None


def _host_name(host: str) -> str | None:
    """The name in a `Host` header, without its port; None if it is none."""
    try:
        return urlsplit(f"//{host}").hostname if host.isprintable() else None
    except ValueError:
        return None


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the request has more than {most:,} bytes; send less, or start the server with a larger --body_mb",
        code="request_too_large",
    )  # fmt: skip


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A channel that replays a body that was read, and then continues with what follows."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _one_line(text: str) -> str:
    return repr(text)[1:-1][:200]
