"""OpenAI's `/v1/files`: documents that are uploaded once and named in messages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import Response

from hetero_kv.server.errors import ApiError
from hetero_kv.server.host import host_of, in_thread, response
from hetero_kv.server.json_response import json_response

router = APIRouter()


@router.post("/v1/files", response_model=None)
async def upload(request: Request) -> Response:
    """Upload a document: multipart form data with `file`, and optionally `purpose`."""
    host = host_of(request)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "an upload is multipart/form-data with a field `file`", param="file")
    try:
        form = await request.form(max_files=1, max_fields=8)
    except Exception as error:
        raise ApiError(400, f"the form cannot be read ({error}); send multipart/form-data", param="file") from error
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "the form has no file; send it as the field `file`", param="file")
        content = await file.read()
    finally:
        await form.close()
    name, kind = file.filename or "document", purpose[:64] if isinstance(purpose, str) else "user_data"
    # A hostile document takes a thread for minutes, and prompts need threads too.
    async with host.uploads:
        stored = await in_thread(host.files.add, content, name, kind, request.state.key)
    return response(json_response(stored.form()), sorted(set(form) - {"file", "purpose"}))


@router.get("/v1/files", response_model=None)
async def list_files(request: Request) -> Response:
    """The documents of this key, the newest first; `purpose`, `order`, `after` and `limit` as OpenAI's."""
    found = await in_thread(host_of(request).files.all, request.state.key)
    purpose, order, after, limit = (request.query_params.get(name) for name in ("purpose", "order", "after", "limit"))
    if order not in (None, "asc", "desc"):
        raise ApiError(400, f"order is {order[:80]!r}; give asc or desc", param="order")
    if order == "asc":
        found.reverse()
    if after is not None:
        ids = [each.id for each in found]
        if after not in ids:
            raise ApiError(404, f"after is {after[:80]!r}, and there is no such file", param="after")
        found = found[ids.index(after) + 1 :]
    if purpose:
        found = [each for each in found if each.purpose == purpose]
    if limit is not None and not (limit.isdecimal() and int(limit[:9]) > 0):
        raise ApiError(400, f"limit is {limit[:80]!r}; give a number of at least 1", param="limit")
    shown = found if limit is None else found[: int(limit[:9])]
    ends = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {}
    data = [each.form() for each in shown]
    return json_response({"object": "list", "data": data, "has_more": len(shown) < len(found), **ends})


@router.get("/v1/files/{file_id}", response_model=None)
async def file(file_id: str, request: Request) -> Response:
    """The metadata of a document."""
    return json_response((await in_thread(host_of(request).files.get, file_id, request.state.key)).form())


@router.get("/v1/files/{file_id}/content", response_model=None)
async def content(file_id: str, request: Request) -> Response:
    """The text of a document."""
    text = await in_thread(host_of(request).files.text, file_id, request.state.key)
    return Response(text.encode(), media_type="text/plain; charset=utf-8")


@router.delete("/v1/files/{file_id}", response_model=None)
async def delete(file_id: str, request: Request) -> Response:
    """Remove a document."""
    await in_thread(host_of(request).files.delete, file_id, request.state.key)
    return json_response({"id": file_id, "object": "file", "deleted": True})
