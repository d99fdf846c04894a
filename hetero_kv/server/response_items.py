"""Items of OpenAI's Responses API as messages of a conversation."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from hetero_kv.errors import shown
from hetero_kv.server.errors import ApiError
from hetero_kv.server.messages import content_text

FileText = Callable[[str], str]


def item_messages(items: Any, file_text: FileText) -> tuple[list[dict[str, Any]], str | None]:
    """The input of a response as chat messages, and the question about the last document.

    Calls of one answer, and its thought, become one message, as chat templates require.

    Args:
        items: a text, or a list of items.

    Raises ApiError 400 for invalid items.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}], None
    if not isinstance(items, list):
        raise ApiError(400, f"input is {shown(items, 80)}; give a text or a list of items", param="input")
    found: list[dict[str, Any]] = []
    question = None
    for number, item in enumerate(items):
        place = f"input[{number}]"
        if not isinstance(item, dict):
            raise ApiError(400, f"{place} is {shown(item, 80)}; give an object", param=place)
        match item.get("type", "message"):
            case "message" if item.get("content") is None:
                raise ApiError(400, f"{place} has no content; give a text or a list of parts", param=place)
            case "message":
                content = content_text(item.get("content"), place, file_text)
                role = item.get("role", "user")
                _append(found, {"role": role, "content": content.text})
                question = content.question if role == "user" else question
            case "function_call" if item.get("status") == "incomplete":
                # The call was cut off, and has no arguments that a template could show.
                continue
            case "function_call":
                function = {"name": str(item.get("name", "")), "arguments": item.get("arguments") or "{}"}
                call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
                _append(found, {"role": "assistant", "content": "", "tool_calls": [call]})
            case "function_call_output":
                output = content_text(item.get("output"), place, file_text).text
                found.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": output})
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                if not isinstance(parts, list):
                    raise ApiError(400, f"{place}.content is {shown(parts, 80)}; give a list of parts", param=place)
                text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
                _append(found, {"role": "assistant", "content": "", "reasoning_content": text})
            case kind:
                raise ApiError(
                    400, f"{place} has the type {shown(kind, 80)}; give message, function_call, "
                    "function_call_output or reasoning", param=place,
                )  # fmt: skip
    return found, question


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message; the continuation of an answer is merged into the answer before it."""
    last = messages[-1] if messages else {}
    is_same = message["role"] == "assistant" == last.get("role")
    if not is_same or (last["content"] and message["content"]) or "reasoning_content" in message:
        messages.append(message)
        return
    last["content"] += message["content"]
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def chat_tools(tools: Sequence[Any] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Functions in chat completions' format, and the types of tools that only OpenAI's own servers run."""
    found, others = [], []
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise ApiError(400, f"tools[{number}] is {shown(tool, 80)}; give an object", param=f"tools[{number}]")
        if tool.get("type") == "function":
            inner = tool.get("function")
            described = inner if isinstance(inner, dict) else tool
            kept = {
                key: described[key] for key in ("name", "description", "parameters") if described.get(key) is not None
            }
            found.append({"type": "function", "function": kept})
        else:
            others.append(f"tools[{number}] ({tool.get('type')})")
    return found, others


def chat_tool_choice(choice: Any) -> Any:
    """A tool choice in chat completions' format."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def new_id(kind: str) -> str:
    """A new id that nobody can guess: "msg_…"."""
    return f"{kind}_{secrets.token_hex(16)}"
