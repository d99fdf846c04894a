"""OpenAI's `/v1/completions`: texts or token ids that a model continues."""

from __future__ import annotations

import secrets
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hetero_kv.models.text_encoding import PromptPiece
from hetero_kv.server.constraints import masks_of
from hetero_kv.server.errors import ApiError, error_body
from hetero_kv.server.generation import Ended, GenerationRequest, Token
from hetero_kv.server.host import EventStream, completed, host_of, in_thread, response
from hetero_kv.server.json_response import json_response
from hetero_kv.server.sampling_fields import SamplingFields, StreamOptions
from hetero_kv.server.served import ServedModel
from hetero_kv.server.streaming import event
from hetero_kv.server.token_texts import completion_logprobs
from hetero_kv.server.usage import FINISH_REASONS, prompt_progress, timings, usage
from hetero_kv.serving.grammar import GrammarMask
from hetero_kv.serving.stream import Progress

router = APIRouter()
#: The largest number of prompts of one request.
MOST_PROMPTS = 64


class CompletionRequest(SamplingFields):
    """The body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]] = ""
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    cache_prompt: bool = True
    # Whether control tokens in the prompt's text count as such; a text prompt has no other way to write them.
    parse_special: bool = True
    json_schema: Any = None
    grammar: str | None = None
    response_format: dict[str, Any] | None = None


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text, or several."""
    host = host_of(request)
    served = host.models.named(body.model)
    _require_supported(body)
    prompts, masks = await in_thread(_prepared, served, body)
    sampling = body.sampling(
        served, host.defaults, limit=16 if body.max_tokens is None else body.max_tokens, logprobs=body.logprobs,
        masks=masks,
    )  # fmt: skip
    continued = GenerationRequest(
        served, prompts, sampling, priority=body.priority, reuses=body.cache_prompt, speculation=body.speculation
    )
    answers = host.answers(continued, request)
    writer = _Writer(served, body)
    if body.stream:
        return response(
            EventStream(answers, writer, host.settings.ping_s, request), body.ignored(served, host.defaults)
        )
    return response(json_response(writer.whole(await completed(answers, request))), body.ignored(served, host.defaults))


def _require_supported(body: CompletionRequest) -> None:
    if body.echo:
        raise ApiError(400, "echo is not supported; put the prompt before the answer yourself", param="echo")
    if body.suffix:
        raise ApiError(
            400, "suffix is not supported; write the model's own tokens for filling in the middle into the prompt, as "
            "<|fim_prefix|>…<|fim_suffix|>…<|fim_middle|>", param="suffix",
        )  # fmt: skip
    if body.best_of is not None and body.best_of != body.choices:
        raise ApiError(400, f"best_of is {body.best_of}; it must be n, or be left out", param="best_of")


def _prepared(served: ServedModel, body: CompletionRequest) -> tuple[list[list[int]], list[GrammarMask | None]]:
    prompts = _prompts(served, body)
    return prompts, masks_of(served, body, len(prompts) * body.choices)


def _prompts(served: ServedModel, body: CompletionRequest) -> list[list[int]]:
    """The prompts' tokens. Raises ApiError 400 for none, too many, and HeteroKVError for texts that have no tokens."""
    given: Any = body.prompt
    listed = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if len(listed) > MOST_PROMPTS:
        raise ApiError(400, f"there are {len(listed)} prompts; give at most {MOST_PROMPTS}", param="prompt")
    prompts = [
        served.encoder.encode([PromptPiece(each, is_template=body.parse_special)], add_special_tokens=True)
        if isinstance(each, str)
        else each
        for each in listed
    ]
    if not all(prompts):
        raise ApiError(400, "a prompt is empty; give a text, or token ids", param="prompt")
    for token in {each for prompt in prompts for each in (min(prompt), max(prompt))}:
        if not 0 <= token < served.engine.vocab_size:
            raise ApiError(
                400, f"the prompt has token {token}; the model has tokens 0 to {served.engine.vocab_size - 1}",
                param="prompt",
            )  # fmt: skip
    return prompts


class _Writer:
    def __init__(self, served: ServedModel, body: CompletionRequest) -> None:
        self._served, self._body = served, body
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        # By choice: the offset of the next token's text.
        self._offsets: dict[int, int] = {}

    def begin(self) -> list[bytes]:
        return []

    def progress(self, progress: Progress) -> list[bytes]:
        if not self._body.return_progress:
            return []
        return [event({**self._form([]), "prompt_progress": prompt_progress(progress)})]

    def token(self, token: Token) -> list[bytes]:
        piece = token.piece
        choice: dict[str, Any] = {"index": token.choice, "text": piece.text, "logprobs": None, "finish_reason": None}
        if piece.logprob is not None:
            start = self._offsets.get(token.choice, 0)
            self._offsets[token.choice] = start + len(piece.text)
            choice["logprobs"] = completion_logprobs(self._served.tokenizer, [piece], start)
        elif not piece.text:
            return []
        return [event(self._form([choice]))]

    def ended(self, ended: Ended) -> list[bytes]:
        done = ended.completion
        rest = done.text[len("".join(piece.text for piece in done.pieces)) :]
        choice = {
            "index": ended.choice, "text": rest, "logprobs": None, "finish_reason": FINISH_REASONS[done.finish_reason]
        }  # fmt: skip
        return [event({**self._form([choice]), "timings": timings(done)})]

    def finish(self, ended: list[Ended]) -> list[bytes]:
        frames = []
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            counts = usage([each.completion for each in ended], self._body.choices)
            frames.append(event({**self._form([]), "usage": counts}))
        return [*frames, event("[DONE]")]

    def failed(self, error: ApiError) -> list[bytes]:
        return [event(error_body(error, "/v1/completions")), event("[DONE]")]

    def whole(self, ended: list[Ended]) -> dict[str, Any]:
        """The response that is not streamed."""
        completions = [each.completion for each in ended]
        tokenizer = self._served.tokenizer
        choices = [
            {
                "index": number,
                "text": each.text,
                "logprobs": None
                if self._body.logprobs is None
                else completion_logprobs(tokenizer, list(each.pieces), 0),
                "finish_reason": FINISH_REASONS[each.finish_reason],
            }
            for number, each in enumerate(completions)
        ]
        form = self._form(choices)
        return {**form, "usage": usage(completions, self._body.choices), "timings": timings(completions[0])}

    def _form(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id, "object": "text_completion", "created": self._created, "model": self._served.id,
            "choices": choices,
        }  # fmt: skip
