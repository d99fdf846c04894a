"""Server-sent events, and waiting that ends when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request

from hetero_kv.server.json_response import json_bytes

T = TypeVar("T")

#: A comment, which clients skip.
PING = b": waiting\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event with a JSON value, or a text as it is."""
    content = data.encode() if isinstance(data, str) else json_bytes(data)
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%sdata: %s\n\n" % (head, content)


async def ticking(source: AsyncIterator[T], seconds: float) -> AsyncIterator[T | None]:
    """The items of `source`, and None whenever none arrived for `seconds`."""
    pending: asyncio.Future[T] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(source))
            await asyncio.wait({pending}, timeout=seconds)
            if not pending.done():
                yield None
                continue
            try:
                item = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


class ClientGoneError(Exception):
    """The client closed its connection."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises ClientGoneError then.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    # The body is read, so the next message is the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
        pass
