"""Reads the messages of a conversation in the form of OpenAI's API, with thoughts, tool calls and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.models.json_values import DEEPEST, checked_json, is_deeper, optional_text

#: As in OpenAI's API, mappings: {"role": …, "content": …}, see `read_messages`.
Messages = Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
#: The tags around a reasoning model's thought.
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an earlier answer.

    Attributes:
        id: "" if it has none.
        name: the tool's.
        arguments: a mapping, or the text of arguments that are no JSON object.
        text: the arguments as JSON text, or that text.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    text: str


@dataclass(frozen=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: who speaks.
        content: its text; "" beside tool calls if there is none.
        reasoning: the thought before an answer; "" if there is none.
        calls: an answer's tool calls.
        call_id: for a tool's result, the id of its call; "" if unknown.
        name: for a tool's result, the tool; "" if unknown.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def without_thought(self) -> Message:
        """The message whose thought is apart, where the content has it before `</think>`, as templates split it."""
        if self.role != "assistant" or self.reasoning or END_OF_THOUGHT not in self.content:
            return self
        thought, _, content = self.content.partition(END_OF_THOUGHT)
        thought = thought.lstrip().removeprefix(THOUGHT)
        return replace(self, reasoning=thought.strip("\n"), content=content.lstrip("\n"))


NO_MESSAGES = 'there are no messages; give a list of at least one, {"role": "user", "content": "…"}'


def read_messages(messages: Any, more_roles: Sequence[str] = ()) -> list[Message]:
    """The messages of a conversation.

    Args:
        messages: each a mapping with "role" and "content", a text. An assistant's may have "tool_calls", each
            {"id": …, "type": "function", "function": {"name": …, "arguments": JSON text or a mapping}}, beside which
            the content may be None, and "reasoning_content" (or "reasoning"), its thought. A tool's result has
            "tool_call_id", and "name" if it is not that of the call. Other entries are ignored.
            Messages that are read already may stand before them.
        more_roles: roles besides OpenAI's.

    Raises HeteroKVError for messages of another form.
    """
    if not messages or isinstance(messages, str | Mapping):
        raise HeteroKVError(NO_MESSAGES)
    read: list[Message] = []
    names: dict[str, str] = {}
    # Messages that are read already are not those of the caller.
    known = sum(isinstance(message, Message) for message in messages)
    for number, message in enumerate(messages, start=-known):
        each = message if isinstance(message, Message) else _message(message, f"messages[{number}]", more_roles)
        names |= {call.id: call.name for call in each.calls if call.id}
        if each.role == "tool" and not each.name:
            each = replace(each, name=names.get(each.call_id, ""))
        read.append(each)
    return read


def _message(message: Any, place: str, more_roles: Sequence[str]) -> Message:
    if not isinstance(message, Mapping):
        raise HeteroKVError(f"{place} is {shown(message, 80)}; give a mapping of role and content")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or ()
    if not isinstance(role, str):
        raise HeteroKVError(f"{place} has the role {role!r}; give a text")
    if role not in (*ROLES, *more_roles):
        raise HeteroKVError(f"{place} has the role {shown(role, 80)}; give one of {', '.join(ROLES)}")
    if role == "assistant" and calls and content is None:
        content = ""
    if not isinstance(content, str):
        raise HeteroKVError(f"{place} has the content {shown(content, 80)}; give a text")
    if role == "tool":
        call_id, name = (optional_text(message, key, place) for key in ("tool_call_id", "name"))
        return Message(role, content, call_id=call_id, name=name)
    if role != "assistant":
        return Message(role, content)
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise HeteroKVError(f"{place} has the tool_calls {shown(calls, 80)}; give a list")
    reasoning = optional_text(message, "reasoning_content", place) or optional_text(message, "reasoning", place)
    read = tuple(_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls))
    # Line ends around a thought are the template's.
    return Message(role, content, reasoning.strip("\n"), read)


def _call(call: Any, place: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise HeteroKVError(f'{place} is {shown(call, 80)}; give {{"id": …, "type": "function", "function": {{…}}}}')
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise HeteroKVError(f"{place} has the function name {shown(name, 80)}; give the tool's name")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        return ToolCall(optional_text(call, "id", place), name, _parsed(arguments), arguments)
    if not isinstance(arguments, Mapping):
        raise HeteroKVError(f"{place} has the arguments {shown(arguments, 80)}; give JSON text or a mapping")
    text = checked_json(arguments, f"{place} has arguments")
    return ToolCall(optional_text(call, "id", place), name, json.loads(text), text)


def _parsed(arguments: str) -> Mapping[str, Any] | str:
    """The arguments as a mapping; as they are where they are no JSON object, as a model may have written them."""
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, allow_nan=False)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) and not is_deeper(parsed, DEEPEST) else arguments
