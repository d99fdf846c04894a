"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hetero_kv.server.chat_answers import ChatAnswers, ChatEnded, ChatToken, finish_reason
from hetero_kv.server.chat_prompt import ChatPrompt, Dialogue, prompt_of
from hetero_kv.server.errors import ApiError, error_body
from hetero_kv.server.generation import GenerationRequest
from hetero_kv.server.host import EventStream, Host, completed, host_of, in_thread, response
from hetero_kv.server.json_response import json_response
from hetero_kv.server.messages import chat_messages
from hetero_kv.server.sampling_fields import SamplingFields, StreamOptions
from hetero_kv.server.served import ServedModel
from hetero_kv.server.streaming import event
from hetero_kv.server.token_texts import chat_logprobs
from hetero_kv.server.tool_choice import RequestTools, choice_of, has_strict
from hetero_kv.server.usage import prompt_progress, timings, usage
from hetero_kv.serving.answers import Answer, CallArguments, CallBegun, CallEnded, Content, Event, Reasoning
from hetero_kv.serving.grammar import GrammarMask
from hetero_kv.serving.sampling import MOST_LOGPROBS
from hetero_kv.serving.stream import Progress

router = APIRouter()


class ChatRequest(SamplingFields):
    """The body of `/v1/chat/completions`, with llama-server's further fields."""

    messages: list[Any]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    json_schema: Any = None
    grammar: str | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_progress: bool = False
    return_tokens: bool = False
    cache_prompt: bool = True
    metadata: Any = None
    store: Any = None

    def dialogue(self, host: Host, key: str) -> Dialogue:
        """The conversation. Raises ApiError for invalid messages and unknown documents."""
        found = chat_messages(self.messages, lambda file_id: host.files.text(file_id, key))
        thinks = self.enable_thinking if self.enable_thinking is not None else host.defaults.thinks
        variables = self.chat_template_kwargs or {}
        return Dialogue(
            found.messages, found.question, thinks, self.reasoning_effort, variables, unused=found.unused,
            thinks_field="enable_thinking",
        )  # fmt: skip


@router.post("/v1/chat/completions", response_model=None)
@router.post("/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    host = host_of(request)
    served = host.models.named(body.model)
    choice, prompt, masks = await in_thread(_constrained, host, served, body, request.state.key)
    most = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    sampling = body.sampling(
        served, host.defaults, limit=getattr(body, most), limit_name=most, logprobs=_logprobs(body), masks=masks
    )
    parsers = choice.parsers(served, prompt, body.choices)
    continued = GenerationRequest(
        served, [prompt.tokens], sampling, prompt.question, body.priority, parsers[0].markers, body.cache_prompt,
        body.speculation,
    )  # fmt: skip
    answers = ChatAnswers(host.answers(continued, request), parsers, ends_with_call=choice.ends_with_call)
    unknown = [*body.ignored(served, host.defaults), *prompt.unused, *choice.unused, *(["store"] if body.store else [])]

    def remember(response_id: str) -> array[int]:
        return host.recent.add(response_id, served, prompt.tokens, request.state.key)

    writer = _Writer(served, body, remember)
    if body.stream:
        return response(EventStream(answers, writer, host.settings.ping_s, request), unknown)
    return response(json_response(writer.whole(await completed(answers, request))), unknown)


@router.post("/apply-template", response_model=None)
async def apply_template(body: ChatRequest, request: Request) -> Response:
    """The text of a conversation in the model's chat template, control tokens included (llama-server's route)."""
    host = host_of(request)
    served = host.models.named(body.model)
    _, prompt = await in_thread(_prepared, host, served, body, request.state.key)
    text = await in_thread(lambda: served.tokenizer.decode(prompt.tokens, skip_special_tokens=False))
    return json_response({"prompt": text})


def _prepared(host: Host, served: ServedModel, body: ChatRequest, key: str) -> tuple[RequestTools, ChatPrompt]:
    dialogue = body.dialogue(host, key)
    choice = choice_of(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, strict=has_strict(body.tools))
    return choice, prompt_of(served, choice.shown(dialogue))


def _constrained(
    host: Host, served: ServedModel, body: ChatRequest, key: str
) -> tuple[RequestTools, ChatPrompt, list[GrammarMask | None]]:
    choice, prompt = _prepared(host, served, body, key)
    return choice, prompt, choice.masks(served, prompt, body, body.choices)


def _logprobs(body: ChatRequest) -> int | None:
    """The number of requested alternatives; None for no log-probabilities. Raises ApiError for a mistake."""
    count = body.top_logprobs
    if count is None:
        return 0 if body.logprobs else None
    if not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if not 0 <= count <= MOST_LOGPROBS:
        raise ApiError(400, f"top_logprobs is {count}; it must be from 0 to {MOST_LOGPROBS}", param="top_logprobs")
    return count


class _Writer:
    """Args: remember: called with the response's id; returns what the first answer's tokens are appended to."""

    def __init__(self, served: ServedModel, body: ChatRequest, remember: Callable[[str], array[int]]) -> None:
        self._served, self._body = served, body
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._tokens = remember(self._id)

    def begin(self) -> list[bytes]:
        first = {"role": "assistant", "content": ""}
        return [event(self._chunk(number, first)) for number in range(self._body.choices)]

    def progress(self, progress: Progress) -> list[bytes]:
        if not self._body.return_progress:
            return []
        return [event({**self._form([]), "prompt_progress": prompt_progress(progress)})]

    def token(self, token: ChatToken) -> list[bytes]:
        if token.choice == 0:
            self._tokens.append(token.piece.token)
        deltas = [delta for each in token.events if (delta := _delta(each))]
        logprobs = None
        if token.piece.logprob is not None:
            logprobs = {"content": [chat_logprobs(self._served.tokenizer, token.piece)]}
            deltas = deltas or [{}]
        chunks = [self._chunk(token.choice, delta) for delta in deltas]
        for chunk in chunks:
            if self._body.return_tokens:
                chunk["token_index"] = token.index
        if chunks and logprobs is not None:
            chunks[0]["choices"][0]["logprobs"] = logprobs
        return [event(chunk) for chunk in chunks]

    def ended(self, ended: ChatEnded) -> list[bytes]:
        chunks = [self._chunk(ended.choice, delta) for each in ended.events if (delta := _delta(each))]
        if self._body.return_tokens:
            for chunk in chunks:
                chunk["token_index"] = len(ended.completion.pieces) - 1
        last = self._chunk(ended.choice, {}, finish_reason(ended))
        last["timings"] = timings(ended.completion)
        return [event(chunk) for chunk in (*chunks, last)]

    def finish(self, ended: list[ChatEnded]) -> list[bytes]:
        frames = []
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            frames.append(event({**self._form([]), "usage": self._usage(ended)}))
        return [*frames, event("[DONE]")]

    def failed(self, error: ApiError) -> list[bytes]:
        return [event(error_body(error, "/v1/chat/completions")), event("[DONE]")]

    def whole(self, ended: list[ChatEnded]) -> dict[str, Any]:
        """The response that is not streamed."""
        self._tokens.extend(ended[0].completion.tokens)
        choices = [
            {
                "index": each.choice,
                "message": _message(each.answer),
                "logprobs": self._all_logprobs(each),
                "finish_reason": finish_reason(each),
            }
            for each in ended
        ]
        form = {**self._form(choices), "object": "chat.completion"}
        return {**form, "usage": self._usage(ended), "timings": timings(ended[0].completion)}

    def _usage(self, ended: list[ChatEnded]) -> dict[str, Any]:
        counts = usage([each.completion for each in ended], self._body.choices)
        thought = sum(each.reasoning_tokens for each in ended)
        return {**counts, "completion_tokens_details": {"reasoning_tokens": thought}}

    def _all_logprobs(self, ended: ChatEnded) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": [chat_logprobs(self._served.tokenizer, each) for each in ended.completion.pieces]}

    def _chunk(self, choice: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._form([{"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}])

    def _form(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._served.id,
            "choices": choices,
        }  # fmt: skip


def _delta(part: Event) -> dict[str, Any]:
    match part:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallBegun(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnded(_, False, text):
            # The client has seen the call begin; the text that the model wrote is more useful than half a call.
            return {"content": text}
        case CallEnded():
            return {}


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in answer.calls
        ]
    return message
