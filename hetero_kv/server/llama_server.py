"""llama-server's own routes: tokens, templates, properties, slots, health and metrics."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hetero_kv.models.text_encoding import PromptPiece
from hetero_kv.server.errors import ApiError
from hetero_kv.server.host import host_of, in_thread
from hetero_kv.server.json_response import json_response
from hetero_kv.server.sampling_fields import Fields
from hetero_kv.server.token_texts import token_text

router = APIRouter()


class TokenizeRequest(Fields):
    """The body of `/tokenize`."""

    content: str
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Fields):
    """The body of `/detokenize`."""

    tokens: list[int]
    model: str | None = None


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The tokens of a text."""
    served = host_of(request).models.named(body.model)
    piece = PromptPiece(body.content, is_template=body.parse_special)
    tokens = await in_thread(lambda: served.encoder.encode([piece], add_special_tokens=body.add_special))
    if body.with_pieces:
        tokenizer = served.tokenizer
        return json_response({"tokens": [{"id": each, "piece": token_text(tokenizer, each)} for each in tokens]})
    return json_response({"tokens": tokens})


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of tokens, control tokens included."""
    served = host_of(request).models.named(body.model)
    for token in body.tokens:
        if not 0 <= token < served.engine.vocab_size:
            raise ApiError(
                400, f"tokens has {token}; the model has tokens 0 to {served.engine.vocab_size - 1}", param="tokens"
            )
    text = await in_thread(lambda: served.tokenizer.decode(body.tokens, skip_special_tokens=False))
    return json_response({"content": text})


@router.get("/health", response_model=None)
@router.get("/v1/health", response_model=None)
async def health(request: Request) -> Response:
    """Whether every engine accepts requests and makes progress; 503 if not."""
    host = host_of(request)
    for served in host.models.all:
        status = served.engine.status()
        if not status.is_open or status.is_stuck(host.settings.stuck_s):
            reason = f"has made no step for {status.idle_s:.0f} s" if status.is_open else "is closed"
            raise ApiError(503, f"the engine of {served.id} {reason}; restart the server", code="unhealthy")
    return json_response({"status": "ok"})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Prometheus' metrics."""
    text = await in_thread(host_of(request).metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/props", response_model=None)
async def props(request: Request, model: str | None = None) -> Response:
    """The server's properties and its defaults."""
    host = host_of(request)
    served = host.models.named(model)
    defaults = host.defaults
    params: dict[str, Any] = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
        "presence_penalty": defaults.presence_penalty,
        "frequency_penalty": defaults.frequency_penalty,
        "n_predict": -1,
    }
    template = served.tokenizer.chat_template
    return json_response(
        {
            "default_generation_settings": {"n_ctx": served.engine.max_seq_len, "params": params},
            "total_slots": host.settings.max_batch,
            "model_alias": served.id,
            "model_path": served.model,
            "chat_template": template if isinstance(template, str) else (template or {}).get("default", ""),
            "bos_token": served.tokenizer.bos_token or "",
            "eos_token": served.tokenizer.eos_token or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"hetero-kv {metadata.version('hetero-kv')}",
        }
    )


@router.get("/slots", response_model=None)
async def slots(request: Request, model: str | None = None) -> Response:
    """The running and waiting requests of the engine, without texts."""
    served = host_of(request).models.named(model)
    status = served.engine.status()
    return json_response(
        [
            {
                "id": number,
                "n_ctx": served.engine.max_seq_len,
                "is_processing": each.state != "waiting",
                "state": each.state,
                "n_prompt_tokens": each.prompt_tokens,
                "n_prompt_tokens_processed": each.processed_tokens,
                "n_decoded": each.answer_tokens,
            }
            for number, each in enumerate(status.requests)
        ]
    )


@router.get("/v1/models", response_model=None)
@router.get("/v1/models/", response_model=None, include_in_schema=False)
@router.get("/models", response_model=None)
async def models(request: Request) -> Response:
    """Every model under every recipe that the server offers."""
    return json_response({"object": "list", "data": [_model(each) for each in host_of(request).models.all]})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(name: str, request: Request) -> Response:
    """One model."""
    return json_response(_model(host_of(request).models.named(name)))


def _model(served: Any) -> dict[str, Any]:
    return {
        "id": served.id,
        "object": "model",
        "created": served.created,
        "owned_by": "hetero-kv",
        "meta": {
            "n_ctx": served.engine.max_seq_len,
            "n_ctx_train": served.context_length,
            "n_vocab": served.engine.vocab_size,
            "recipe": served.recipe,
        },
    }
