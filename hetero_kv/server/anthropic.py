"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from pydantic_core import from_json
from starlette.responses import Response

from hetero_kv.errors import shown
from hetero_kv.server.anthropic_messages import openai_tool_choice, openai_tools, system_text, template_messages
from hetero_kv.server.chat_answers import ChatAnswers, ChatEnded, ChatToken
from hetero_kv.server.chat_prompt import ChatPrompt, Dialogue, prompt_of
from hetero_kv.server.errors import ApiError, error_body
from hetero_kv.server.generation import GenerationRequest
from hetero_kv.server.host import EventStream, Host, completed, host_of, in_thread, response
from hetero_kv.server.json_response import json_response
from hetero_kv.server.sampling_fields import Fields, SamplingFields
from hetero_kv.server.served import ServedModel
from hetero_kv.server.streaming import event
from hetero_kv.server.tool_choice import RequestTools, choice_of, has_strict
from hetero_kv.serving.answers import Answer, Call, CallArguments, CallBegun, CallEnded, Content, Event, Reasoning
from hetero_kv.serving.grammar import GrammarMask
from hetero_kv.serving.stream import Completion, Progress

router = APIRouter()


class DialogueFields(Fields):
    """The fields that `/v1/messages` and `count_tokens` have in common."""

    model: str | None = None
    messages: list[Any] = Field(min_length=1)
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(DialogueFields):
    """The body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Any = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    # As in the other APIs here.
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    json_schema: Any = None
    grammar: str | None = None
    speculation: str | None = None


@router.post("/v1/messages", response_model=None)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    host = host_of(request)
    served = host.models.named(body.model)
    form = body.output_format or (body.output_config or {}).get("format")
    if form is not None:
        body.response_format = form
    choice, prompt, others, masks = await in_thread(_constrained, host, served, body, request.state.key)
    fields = SamplingFields(
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, stop=body.stop_sequences, seed=body.seed,
        speculation=body.speculation,
    )  # fmt: skip
    sampling = fields.sampling(served, host.defaults, limit=body.max_tokens, masks=masks)
    parsers = choice.parsers(served, prompt, 1)
    continued = GenerationRequest(
        served, [prompt.tokens], sampling, prompt.question, markers=parsers[0].markers, speculation=body.speculation
    )
    answers = ChatAnswers(host.answers(continued, request), parsers, ends_with_call=choice.ends_with_call)
    writer = _Writer(served, len(prompt.tokens))
    unknown = [*body.unknown, *others, *fields.ignored(served, host.defaults), *prompt.unused, *choice.unused]
    unknown += [f"thinking.{name}" for name in body.thinking or {} if name != "type"]
    unknown += [f"output_config.{name}" for name in body.output_config or {} if name not in ("effort", "format")]
    if body.stream:
        return response(EventStream(answers, writer, host.settings.ping_s, request), unknown)
    (ended,) = await completed(answers, request)
    return response(json_response(writer.whole(ended)), unknown)


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: DialogueFields, request: Request) -> Response:
    """The number of a conversation's tokens."""
    host = host_of(request)
    served = host.models.named(body.model)
    _, prompt, _ = await in_thread(_prepared, host, served, body, request.state.key)
    return json_response({"input_tokens": len(prompt.tokens)})


def _prepared(
    host: Host, served: ServedModel, body: DialogueFields, key: str
) -> tuple[RequestTools, ChatPrompt, list[str]]:
    found, question = template_messages(body.messages, lambda file_id: host.files.text(file_id, key))
    if system := system_text(body.system):
        found.insert(0, {"role": "system", "content": system})
    kind = (body.thinking or {}).get("type")
    if kind not in (None, "enabled", "adaptive", "disabled"):
        raise ApiError(400, f"thinking has the type {shown(kind, 80)}; give enabled, adaptive or disabled")
    thinks = host.defaults.thinks if kind is None else kind != "disabled"
    is_parallel = not (isinstance(body.tool_choice, dict) and body.tool_choice.get("disable_parallel_tool_use"))
    tools, others = openai_tools(body.tools)
    chosen, strict = openai_tool_choice(body.tool_choice), has_strict(body.tools)
    choice = choice_of(tools, chosen, parallel=is_parallel, strict=strict)
    effort = (getattr(body, "output_config", None) or {}).get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(400, f"output_config.effort is {shown(effort, 80)}; give a word")
    dialogue = Dialogue(found, question, thinks=thinks, effort=effort, effort_field="output_config.effort")
    return choice, prompt_of(served, choice.shown(dialogue)), others


def _constrained(
    host: Host, served: ServedModel, body: MessagesRequest, key: str
) -> tuple[RequestTools, ChatPrompt, list[str], list[GrammarMask | None]]:
    choice, prompt, others = _prepared(host, served, body, key)
    return choice, prompt, others, choice.masks(served, prompt, body, 1)


class _Writer:
    def __init__(self, served: ServedModel, prompt_tokens: int) -> None:
        self._served, self._prompt_tokens = served, prompt_tokens
        self._id = f"msg_{secrets.token_hex(12)}"
        # The open block: its number and kind.
        self._number, self._open = -1, ""

    def begin(self) -> list[bytes]:
        message = self._form([], None, None, {"input_tokens": self._prompt_tokens, "output_tokens": 0})
        return [event({"type": "message_start", "message": message}, "message_start")]

    def progress(self, progress: Progress) -> list[bytes]:
        return [event({"type": "ping"}, "ping")]

    def token(self, token: ChatToken) -> list[bytes]:
        return [frame for each in token.events for frame in self._event(each)]

    def ended(self, ended: ChatEnded) -> list[bytes]:
        frames = [frame for each in ended.events for frame in self._event(each)] + self._close()
        reason, stop = _stop(ended)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = _usage(ended.completion)
        frames.append(event({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta"))
        return frames

    def finish(self, ended: list[ChatEnded]) -> list[bytes]:
        return [event({"type": "message_stop"}, "message_stop")]

    def failed(self, error: ApiError) -> list[bytes]:
        return [event(error_body(error, "/v1/messages"), "error")]

    def whole(self, ended: ChatEnded) -> dict[str, Any]:
        """The response that is not streamed."""
        reason, stop = _stop(ended)
        return self._form(_blocks(ended.answer), reason, stop, _usage(ended.completion))

    def _event(self, part: Event) -> list[bytes]:
        match part:
            case Reasoning(text):
                return [*self._begin("thinking"), self._delta({"type": "thinking_delta", "thinking": text})]
            case Content(text):
                return [*self._begin("text"), self._delta({"type": "text_delta", "text": text})]
            case CallBegun(_, call_id, name):
                return self._begin("tool_use", {"id": call_id, "name": name, "input": {}}, is_new=True)
            case CallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case CallEnded(_, False, text):
                return [*self._begin("text"), self._delta({"type": "text_delta", "text": text})]
            case CallEnded():
                return self._close()

    def _begin(self, kind: str, fields: dict[str, Any] | None = None, *, is_new: bool = False) -> list[bytes]:
        """Open a block, unless one of its kind is open."""
        if self._open == kind and not is_new:
            return []
        frames = self._close()
        self._open, self._number = kind, self._number + 1
        empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
        block = {"type": kind, **(empty[kind] if fields is None else fields)}
        begun = {"type": "content_block_start", "index": self._number, "content_block": block}
        return [*frames, event(begun, "content_block_start")]

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        frames = []
        if self._open == "thinking":
            # Clients send a thought back only with a signature.
            frames.append(self._delta({"type": "signature_delta", "signature": self._id}))
        self._open = ""
        return [*frames, event({"type": "content_block_stop", "index": self._number}, "content_block_stop")]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._number, "delta": delta}, "content_block_delta")

    def _form(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._served.id, "content": content,
            "stop_reason": reason, "stop_sequence": stop, "usage": usage,
        }  # fmt: skip


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for part in answer.parts:
        match part:
            case Reasoning(text):
                blocks.append({"type": "thinking", "thinking": text, "signature": "local"})
            case Content(text):
                blocks.append({"type": "text", "text": text})
            case Call(call_id, name, arguments):
                blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": _input(arguments)})
    return blocks


def _input(arguments: str) -> Any:
    """A call's arguments; of one that was cut off, those that are complete, as Anthropic's client reads streams."""
    try:
        return from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        # Nested too deep.
        return {"arguments": arguments}


def _stop(ended: ChatEnded) -> tuple[str, str | None]:
    """Why an answer ended, in Anthropic's words, and the stop text."""
    done = ended.completion
    if done.finish_reason in ("max_new_tokens", "full"):
        return "max_tokens", None
    if done.finish_reason == "stop_text":
        return "stop_sequence", done.stop_text
    return ("tool_use" if ended.answer.calls else "end_turn"), None


def _usage(done: Completion) -> dict[str, int]:
    return {
        "input_tokens": done.prompt_tokens - done.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached_tokens,
        "output_tokens": len(done.pieces),
    }
