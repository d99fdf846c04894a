"""`/v1/attended`: what a token of an answer attended to, passage by passage and layer by layer."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from hetero_kv.server.errors import ApiError
from hetero_kv.server.host import host_of, in_thread
from hetero_kv.server.json_response import json_response
from hetero_kv.server.recent_answers import RecentAnswer
from hetero_kv.server.sampling_fields import Fields
from hetero_kv.server.streaming import while_connected
from hetero_kv.server.token_texts import token_text
from hetero_kv.serving.attended import Attended

router = APIRouter()
#: The largest number of passages, and the longest text shown of one, characters.
MOST_BINS, LONGEST_PASSAGE = 1024, 2000


class AttendedRequest(Fields):
    """The body of `/v1/attended`.

    Attributes:
        response_id: id of a chat completion.
        token: number of the answer's token, from 0, as `token_index` of chunks.
        bins: into how many passages the text before it is divided.
    """

    response_id: str
    token: Annotated[int, Field(ge=0)]
    bins: Annotated[int, Field(ge=1, le=MOST_BINS)] = 200


@router.post("/v1/attended", response_model=None)
async def attended(body: AttendedRequest, request: Request) -> Response:
    """Compute the forward that chose a token again, and return what it attended to."""
    host = host_of(request)
    answer = host.recent.get(body.response_id, request.state.key)
    position = answer.prompt_tokens + body.token
    if position >= len(answer.tokens):
        count = len(answer.tokens) - answer.prompt_tokens
        raise ApiError(400, f"token is {body.token}; the answer has {count} tokens", param="token")
    ticket = answer.served.gate.enter(request.state.key)
    stream = None
    try:
        await while_connected(request, ticket.turn())
        stream = answer.served.engine.attended(
            answer.tokens, position, prompt_tokens=answer.prompt_tokens, bins=body.bins,
            tenant=host.tenant(request),
        )  # fmt: skip
        found = await while_connected(request, stream)
    finally:
        if stream is not None and not stream.is_done:
            stream.cancel()
        ticket.leave()
    return json_response(await in_thread(_form, answer, found))


def _form(answer: RecentAnswer, found: Attended) -> dict[str, Any]:
    tokenizer = answer.served.tokenizer
    edges, total, chosen = found.edges.tolist(), found.total.tolist(), found.chosen.mean(axis=0).tolist()
    bins = []
    for number, (first, stop) in enumerate(pairwise(edges)):
        text = tokenizer.decode(list(answer.tokens[first:stop]), skip_special_tokens=False)
        bins.append(
            {
                "first": first,
                "last": stop - 1,
                "share": total[number],
                "chosen": chosen[number],
                "text": text[:LONGEST_PASSAGE],
                "is_cut": len(text) > LONGEST_PASSAGE,
            }
        )
    return {
        "token": token_text(tokenizer, answer.tokens[found.position]),
        "prompt_tokens": answer.prompt_tokens,
        "bins": bins,
        "layers": found.masses.tolist(),
        "layer_numbers": list(found.layers),
        "estimated": float(found.estimated.mean()),
        "sinks": float(found.sinks.mean()),
    }
