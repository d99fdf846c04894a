"""Anthropic's messages converted to those of chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hetero_kv.errors import shown
from hetero_kv.server.errors import ApiError
from hetero_kv.server.messages import embedded_text

#: A line that Claude Code puts at the head of the system message. It changes with every request, so no prompt would
#: share a prefix.
_BILLING = "x-anthropic-billing-header:"
# Prefixes of the types of tools that Anthropic's own servers run; clients run all others.
_RUN_AT_ANTHROPIC = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "mcp_toolset")

FileText = Callable[[str], str]


def system_text(system: Any) -> str:
    """The system message: a text, or a list of blocks of text. Raises ApiError 400 for another form."""
    if system is None or isinstance(system, str):
        return system or ""
    if not isinstance(system, list) or not all(isinstance(block, dict) for block in system):
        raise ApiError(400, f"system is {shown(system, 80)}; give a text or a list of text blocks")
    texts = []
    for number, block in enumerate(system):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ApiError(400, f"system[{number}] is {shown(block, 80)}; give a block of the type text")
        text = block["text"].partition("\n")[2] if block["text"].startswith(_BILLING) else block["text"]
        if text:
            texts.append(text)
    return "\n\n".join(texts)


def template_messages(messages: list[Any], file_text: FileText) -> tuple[list[dict[str, Any]], str | None]:
    """Messages in OpenAI's format with texts as contents, and the question about the last document.

    Raises ApiError 400 for invalid blocks, and for blocks without text.
    """
    found: list[dict[str, Any]] = []
    question = None
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise ApiError(400, f"{place} is {shown(message, 80)}; give an object with the role user or assistant")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise ApiError(400, f"{place}.content is {shown(content, 80)}; give a text or a list of blocks")
        if message["role"] == "assistant":
            found.append(_assistant(blocks, place))
        else:
            results, text, last = _user(blocks, place, file_text)
            found += results
            if text or not results:
                found.append({"role": message["role"], "content": text})
                question = last
    return found, question


def _assistant(blocks: list[dict[str, Any]], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                message["content"] += _text(block, "text", f"{place}.content[{number}]")
            case "thinking":
                thought = _text(block, "thinking", f"{place}.content[{number}]")
                message["reasoning_content"] = "\n".join(filter(None, (message.get("reasoning_content"), thought)))
            case "redacted_thinking":
                pass
            case "tool_use":
                call = {"name": str(block.get("name", "")), "arguments": json.dumps(block.get("input") or {})}
                entry = {"id": str(block.get("id", "")), "type": "function", "function": call}
                message.setdefault("tool_calls", []).append(entry)
            case kind:
                raise _unknown(kind, f"{place}.content[{number}]")
    return message


def _user(
    blocks: list[dict[str, Any]], place: str, file_text: FileText
) -> tuple[list[dict[str, Any]], str, str | None]:
    """Results of tools, the text, and the question after a document."""
    results, texts = [], []
    has_document, question = False, None
    for number, block in enumerate(blocks):
        where = f"{place}.content[{number}]"
        match block.get("type"):
            case "text":
                texts.append(_text(block, "text", where))
                question = texts[-1] if has_document else None
            case "document":
                texts.append(_document(block, where, file_text))
                has_document, question = True, None
            case "tool_result":
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": str(block.get("tool_use_id", "")),
                        "content": _result(block, where, file_text),
                    }
                )
            case kind:
                raise _unknown(kind, where)
    return results, "\n\n".join(texts) if has_document else "\n".join(texts), question


def _result(block: dict[str, Any], where: str, file_text: FileText) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list):
        texts = []
        for number, each in enumerate(content):
            place = f"{where}.content[{number}]"
            match each:
                case {"type": "text"}:
                    texts.append(_text(each, "text", place))
                case {"type": "document"}:
                    texts.append(_document(each, place, file_text))
                case _:
                    raise _unknown(each.get("type") if isinstance(each, dict) else each, place)
        text = "\n".join(texts)
    else:
        raise ApiError(400, f"{where}.content is {shown(content, 80)}; give a text or a list of text blocks")
    return f"Error: {text}" if block.get("is_error") else text


def _document(block: dict[str, Any], where: str, file_text: FileText) -> str:
    source = block.get("source")
    title = block.get("title")
    head = f"{title}\n\n" if isinstance(title, str) and title else ""
    match source:
        case {"type": "text", "data": str(text)}:
            return head + text.strip("\n")
        case {"type": "base64", "data": str(data)}:
            return head + embedded_text(data, title or "document", where)
        case {"type": "file", "file_id": str(file_id)}:
            return head + file_text(file_id).strip("\n")
    raise ApiError(
        400, f"{where}.source is {shown(source, 80)}; give a text, base64 or a file_id. URLs are not fetched"
    )


def _text(block: dict[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise ApiError(400, f"{where}.{name} is {shown(text, 80)}; give a text")
    return text


def _unknown(kind: Any, where: str) -> ApiError:
    if kind == "image":
        return ApiError(400, f"{where} is an image, and the model reads texts only; leave it out")
    return ApiError(400, f"{where} has the type {shown(kind, 80)}, which is unknown here; leave it out")


def openai_tools(tools: list[Any] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Tools in OpenAI's format, and the types of those that only Anthropic's own servers run.

    Raises ApiError 400 for tools of another form.
    """
    found, others = [], []
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise ApiError(400, f"tools[{number}] is {shown(tool, 80)}; give an object with name and input_schema")
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith(_RUN_AT_ANTHROPIC):
            others.append(f"tools[{number}] ({kind})")
            continue
        if kind not in (None, "custom"):
            raise ApiError(
                400,
                f"tools[{number}] has the type {shown(kind, 80)}, whose arguments only Anthropic's models know; give "
                "it with name, description and input_schema, and without a type",
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found, others


def openai_tool_choice(choice: Any) -> Any:
    """A tool choice in OpenAI's format. Raises ApiError 400 for an invalid one."""
    match choice:
        case None | {"type": "auto"}:
            return "auto"
        case {"type": "any"}:
            return "required"
        case {"type": "none"}:
            return "none"
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise ApiError(400, f"tool_choice is {shown(choice, 80)}; give the type auto, any, tool or none")
