"""OpenAI's `/v1/responses`."""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hetero_kv.errors import shown
from hetero_kv.server.chat_answers import ChatAnswers, ChatEnded, ChatToken
from hetero_kv.server.chat_prompt import ChatPrompt, Dialogue, prompt_of
from hetero_kv.server.errors import ApiError
from hetero_kv.server.generation import GenerationRequest
from hetero_kv.server.host import EventStream, Host, completed, host_of, in_thread, response
from hetero_kv.server.json_response import json_response
from hetero_kv.server.response_items import chat_tool_choice, chat_tools, item_messages, new_id
from hetero_kv.server.sampling_fields import SamplingFields
from hetero_kv.server.served import ServedModel
from hetero_kv.server.streaming import event
from hetero_kv.server.tool_choice import RequestTools, choice_of, has_strict
from hetero_kv.serving.answers import Call, CallArguments, CallBegun, CallEnded, Content, Event, Reasoning
from hetero_kv.serving.grammar import GrammarMask
from hetero_kv.serving.stream import Progress

_logger = logging.getLogger(__name__)
router = APIRouter()
# What OpenAI's own server includes.
_LOGPROBS = "message.output_text.logprobs"
# The reasons of incomplete answers.
_CUT = ("max_new_tokens", "full")


class ResponseRequest(SamplingFields):
    """The body of `/v1/responses`."""

    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    store: bool = True
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    include: list[Any] | None = None
    top_logprobs: int | None = None
    # As in the other APIs here.
    response_format: dict[str, Any] | None = None
    json_schema: Any = None
    grammar: str | None = None


@router.post("/v1/responses", response_model=None)
async def create(body: ResponseRequest, request: Request) -> Response:
    """Answer a conversation, or continue an earlier response."""
    host, key = host_of(request), request.state.key
    served = host.models.named(body.model)
    _require_supported(body)
    if body.response_format is None:
        body.response_format = (body.text or {}).get("format")
    items, others, choice, prompt, masks = await in_thread(_prepared, host, served, body, key)
    sampling = body.sampling(
        served, host.defaults, limit=body.max_output_tokens, limit_name="max_output_tokens", masks=masks
    )
    parsers = choice.parsers(served, prompt, 1)
    continued = GenerationRequest(
        served, [prompt.tokens], sampling, prompt.question, body.priority, parsers[0].markers,
        speculation=body.speculation,
    )  # fmt: skip
    answers = ChatAnswers(host.answers(continued, request), parsers, ends_with_call=choice.ends_with_call)
    writer = _Writer(served, body, lambda found, output: _keep(host, body, found, [*items, *output], key))
    unknown = [*body.ignored(served, host.defaults), *prompt.unused, *choice.unused, *others, *_without_effect(body)]
    if body.stream:
        return response(EventStream(answers, writer, host.settings.ping_s, request), unknown)
    (ended,) = await completed(answers, request)
    return response(json_response(await in_thread(writer.whole, ended)), unknown)


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve(response_id: str, request: Request) -> Response:
    """An earlier response."""
    found, _ = await in_thread(host_of(request).responses.get, response_id, request.state.key)
    return json_response(found)


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete(response_id: str, request: Request) -> Response:
    """Forget a response."""
    await in_thread(host_of(request).responses.delete, response_id, request.state.key)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _without_effect(body: ResponseRequest) -> list[str]:
    """Fields of OpenAI's API that have no effect here."""
    nested = {"reasoning": (body.reasoning, ("effort",)), "text": (body.text, ("format",))}
    inner = [f"{name}.{key}" for name, (value, used) in nested.items() for key in value or {} if key not in used]
    given = body.input if isinstance(body.input, list) else ()
    sealed = any(isinstance(item, dict) and item.get("encrypted_content") for item in given)
    return [*inner, *(["include"] if body.include else []), *(["input.encrypted_content"] if sealed else [])]


def _require_supported(body: ResponseRequest) -> None:
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise ApiError(
                400, f"{name} is what OpenAI's own server keeps; give its items as input, or previous_response_id",
                param=name,
            )  # fmt: skip
    if body.truncation not in (None, "disabled"):
        raise ApiError(
            400, f"truncation is {body.truncation!r}, and nothing is cut here; leave it out, or give disabled",
            param="truncation",
        )  # fmt: skip
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        raise ApiError(
            400, "a response has no log-probabilities here; ask /v1/chat/completions for them, or leave out "
            f"top_logprobs and {_LOGPROBS}", param="top_logprobs" if body.top_logprobs else "include",
        )  # fmt: skip
    if body.choices != 1:
        raise ApiError(400, f"n is {body.n}; a response has one answer", param="n")


def _prepared(
    host: Host, served: ServedModel, body: ResponseRequest, key: str
) -> tuple[list[Any], list[str], RequestTools, ChatPrompt, list[GrammarMask | None]]:
    earlier = [] if body.previous_response_id is None else host.responses.get(body.previous_response_id, key)[1]
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not isinstance(given, list):
        raise ApiError(400, f"input is {shown(given, 80)}; give a text or a list of items", param="input")
    items = [*earlier, *given]
    messages, question = item_messages(items, lambda file_id: host.files.text(file_id, key))
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    tools, others = chat_tools(body.tools)
    chosen, strict = chat_tool_choice(body.tool_choice), has_strict(body.tools)
    choice = choice_of(tools, chosen, parallel=body.parallel_tool_calls, strict=strict)
    effort = (body.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(400, f"reasoning.effort is {shown(effort, 80)}; give a word", param="reasoning")
    dialogue = Dialogue(messages, question, thinks=host.defaults.thinks, effort=effort, effort_field="reasoning.effort")
    prompt = prompt_of(served, choice.shown(dialogue))
    return list(items), others, choice, prompt, choice.masks(served, prompt, body, 1)


def _keep(host: Host, body: ResponseRequest, found: dict[str, Any], items: list[Any], key: str) -> None:
    if body.store:
        try:
            host.responses.put(found, items, key)
        except OSError as error:
            # The answer is worth more than its copy.
            _logger.warning("the response %s is not stored: %s", found["id"], error)
            found["store"] = False


class _Writer:
    """Args: keep: called with a complete response and its output items."""

    def __init__(self, served: ServedModel, body: ResponseRequest, keep: Any) -> None:
        self._served, self._body, self._keep = served, body, keep
        self._id, self._created = new_id("resp"), int(time.time())
        self._sequence = 0
        # The contents of the open item, and the items before it.
        self._text, self._call = "", Call("", "")
        self._closed: list[dict[str, Any]] = []
        # The items so far: id and kind, the last one open unless `_is_open` is False.
        self._items: list[tuple[str, str]] = []
        self._is_open = False

    def begin(self) -> list[bytes]:
        return [
            self._event(f"response.{name}", {"response": self._form([], "in_progress")})
            for name in ("created", "in_progress")
        ]

    def progress(self, progress: Progress) -> list[bytes]:
        return []

    def token(self, token: ChatToken) -> list[bytes]:
        return [frame for each in token.events for frame in self._part(each)]

    def ended(self, ended: ChatEnded) -> list[bytes]:
        frames = [frame for each in ended.events for frame in self._part(each)]
        frames += self._last(ended)
        whole = self._complete(ended)
        name = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return [*frames, self._event(name, {"response": whole})]

    def finish(self, ended: list[ChatEnded]) -> list[bytes]:
        return []

    def failed(self, error: ApiError) -> list[bytes]:
        form = self._form([], "failed")
        form["error"] = {"code": error.code or "server_error", "message": error.message}
        return [self._event("response.failed", {"response": form})]

    def whole(self, ended: ChatEnded) -> dict[str, Any]:
        """The response that is not streamed."""
        for part in ended.answer.parts:
            if isinstance(part, Call):
                self._part(CallBegun(0, part.id, part.name))
                self._part(CallArguments(0, part.arguments))
                if not ended.answer.is_cut or part is not ended.answer.parts[-1]:
                    self._close()
            else:
                self._part(part)
        self._last(ended)
        return self._complete(ended)

    def _complete(self, ended: ChatEnded) -> dict[str, Any]:
        """The complete response, which is kept."""
        done, output = ended.completion, self._closed
        is_complete = done.finish_reason not in _CUT
        form = self._form(output, "completed" if is_complete else "incomplete")
        if not is_complete:
            form["incomplete_details"] = {"reason": "max_output_tokens"}
        form["usage"] = {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.cached_tokens},
            "output_tokens": len(done.pieces),
            "output_tokens_details": {"reasoning_tokens": ended.reasoning_tokens},
            "total_tokens": done.prompt_tokens + len(done.pieces),
        }
        self._keep(form, output)
        return form

    # -- events

    def _last(self, ended: ChatEnded) -> list[bytes]:
        """The end of the last item; an answer without any has an empty message."""
        frames = [] if self._items else self._open("message")
        is_cut = ended.completion.finish_reason in _CUT or ended.answer.is_cut
        return frames + self._close(is_complete=not is_cut)

    def _part(self, part: Event) -> list[bytes]:
        if isinstance(part, CallEnded):
            closed = self._close(is_complete=part.is_valid)
            return closed if part.is_valid else closed + self._part(Content(part.text))
        kind = {Reasoning: "reasoning", Content: "message"}.get(type(part), "function_call")
        frames: list[bytes] = []
        if isinstance(part, CallBegun) or not self._is_open or self._items[-1][1] != kind:
            frames += self._close()
            self._text, self._call = "", Call(part.id, part.name) if isinstance(part, CallBegun) else Call("", "")
            frames += self._open(kind)
        if isinstance(part, Reasoning | Content):
            self._text += part.text
        elif isinstance(part, CallArguments):
            self._call.arguments += part.text
        place: dict[str, Any] = {"item_id": self._items[-1][0], "output_index": len(self._items) - 1}
        match part:
            case Reasoning(text):
                frames.append(
                    self._event("response.reasoning_text.delta", {**place, "content_index": 0, "delta": text})
                )
            case Content(text):
                delta = {**place, "content_index": 0, "delta": text, "logprobs": []}
                frames.append(self._event("response.output_text.delta", delta))
            case CallArguments(_, text):
                frames.append(self._event("response.function_call_arguments.delta", {**place, "delta": text}))
        return frames

    def _item(self, status: str) -> dict[str, Any]:
        """The open item as it is."""
        item_id, kind = self._items[-1]
        item = {"id": item_id, "type": kind, "status": status}
        match kind:
            case "reasoning":
                return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": self._text}]}
            case "message":
                content = [] if status == "in_progress" else [self._part_of_text()]
                return {**item, "role": "assistant", "content": content}
        arguments = "" if status == "in_progress" else self._call.arguments
        return {**item, "call_id": self._call.id, "name": self._call.name, "arguments": arguments}

    def _part_of_text(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _open(self, kind: str) -> list[bytes]:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        self._items.append((new_id(prefix), kind))
        self._is_open = True
        place = {"output_index": len(self._items) - 1}
        frames = [self._event("response.output_item.added", {**place, "item": self._item("in_progress")})]
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            added = {"item_id": self._items[-1][0], **place, "content_index": 0, "part": part}
            frames.append(self._event("response.content_part.added", added))
        return frames

    def _close(self, *, is_complete: bool = True) -> list[bytes]:
        if not self._is_open:
            return []
        self._is_open = False
        item_id, kind = self._items[-1]
        place: dict[str, Any] = {"item_id": item_id, "output_index": len(self._items) - 1}
        frames = []
        match kind:
            case "reasoning":
                done = {**place, "content_index": 0, "text": self._text}
                frames.append(self._event("response.reasoning_text.done", done))
            case "message":
                inner = {**place, "content_index": 0}
                done = {**inner, "text": self._text, "logprobs": []}
                frames.append(self._event("response.output_text.done", done))
                frames.append(self._event("response.content_part.done", {**inner, "part": self._part_of_text()}))
            case _ if is_complete:
                done = {**place, "name": self._call.name, "arguments": self._call.arguments}
                frames.append(self._event("response.function_call_arguments.done", done))
        self._closed.append(self._item("completed" if is_complete else "incomplete"))
        item = {"output_index": place["output_index"], "item": self._closed[-1]}
        return [*frames, self._event("response.output_item.done", item)]

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)

    def _form(self, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._served.id,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "parallel_tool_calls": body.parallel_tool_calls,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "temperature": body.temperature,
            "top_p": body.top_p,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "store": body.store,
            "truncation": "disabled",
            "usage": None,
        }
