"""The page for people: a chat with documents, as plain files."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter()
_FOLDER = Path(__file__).parent / "page"
# Not `mimetypes`, because Windows' registry can give types that browsers refuse.
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class PageFile(NamedTuple):
    """A file of the page; `etag` changes with its content."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """The page's files by their names."""
    return {
        path.name: PageFile(
            content := path.read_bytes(), _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        )
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _MEDIA_TYPES
    }


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
async def page(request: Request) -> Response:
    """The page."""
    return _response("index.html", request)


@router.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
async def page_file(name: str, request: Request) -> Response:
    """A file of the page."""
    return _response(name, request)


def _response(name: str, request: Request) -> Response:
    found = page_files().get(name)
    if found is None:
        raise HTTPException(404)
    # Browsers check every time for a newer one: a server of another version has another page.
    headers = {"etag": found.etag, "cache-control": "no-cache"}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if found.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
