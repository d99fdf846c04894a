"""Messages of requests converted to those of chat templates, with the texts of documents inserted."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hetero_kv.documents.reading import document_from
from hetero_kv.errors import shown
from hetero_kv.server.errors import ApiError

#: Content parts that a text model cannot read.
_UNSEEN = ("image_url", "input_image", "image", "input_audio", "audio", "video_url", "video")
# Fields of messages that have an effect, and those without which a conversation would lack something.
_FIELDS = {"role", "content", "refusal", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning"}
_UNREAD = {
    "function_call": "give it as tool_calls, and its result as a message with the role tool",
    "audio": "the model reads texts only; give its transcript as content",
}
_TEXTS = ("text", "input_text", "output_text", "refusal")


class UserContent(NamedTuple):
    """The content of a message.

    Attributes:
        text: documents and texts, as the model reads them.
        question: the last text after a document; None without documents.
    """

    text: str
    question: str | None = None


def content_text(content: Any, place: str, file_text: Callable[[str], str]) -> UserContent:
    """A message's content: a text, or a list of parts.

    Args:
        place: the message, for errors: "messages[2]".
        file_text: the text of an uploaded document by its id.

    Raises ApiError 400 for a part that is not text nor a document, and 404 for an unknown document.
    """
    if content is None or isinstance(content, str):
        return UserContent(content or "")
    if not isinstance(content, list):
        raise ApiError(400, f"{place}.content is {shown(content, 80)}; give a text or a list of parts", param=place)
    texts: list[str] = []
    joints: list[str] = []
    has_document, question = False, None
    for number, part in enumerate(content):
        where = f"{place}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXTS and isinstance(part.get("refusal" if kind == "refusal" else "text"), str):
            text, is_document = part["refusal" if kind == "refusal" else "text"], False
        elif kind in ("file", "input_file"):
            text, is_document = _document(part, where, file_text), True
        else:
            raise _unknown(kind, where)
        # A document is separated from the text around it.
        joints.append("" if not texts else "\n\n" if is_document or (has_document and question is None) else "\n")
        texts.append(text)
        has_document = has_document or is_document
        question = None if is_document else text if has_document else None
    return UserContent("".join(part for pair in zip(joints, texts, strict=True) for part in pair), question)


def _unknown(kind: Any, where: str) -> ApiError:
    if kind in _UNSEEN:
        return ApiError(
            400, f"{where} has the type {kind!r}, and the model reads texts only; leave it out", param=where
        )
    return ApiError(400, f"{where} has the type {shown(kind, 80)}; give text or file", param=where)


def _document(part: dict[str, Any], where: str, file_text: Callable[[str], str]) -> str:
    """The text of a document that a part names or contains."""
    described = part.get("file") if part.get("type") == "file" and isinstance(part.get("file"), dict) else part
    assert isinstance(described, dict)
    file_id, data, name = (described.get(key) for key in ("file_id", "file_data", "filename"))
    if isinstance(file_id, str):
        return file_text(file_id).strip("\n")
    if not isinstance(data, str):
        raise ApiError(
            400, f"{where} has neither file_id nor file_data; upload the document by POST /v1/files. URLs are not "
            "fetched", param=where,
        )  # fmt: skip
    return embedded_text(data.partition(",")[2] if data.startswith("data:") else data, name or "document", where)


def embedded_text(data: str, filename: Any, where: str) -> str:
    """The text of a document in base64. Raises ApiError 400 for other data, ConfigError for one without text."""
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, f"{where} is not base64; encode the document's bytes so", param=where) from None
    return document_from(content, filename if isinstance(filename, str) else "document").text.strip("\n")


class ChatMessages(NamedTuple):
    """A conversation.

    Attributes:
        messages: in OpenAI's format, with texts as contents.
        question: the question about the last document.
        unused: the fields of messages without effect.
    """

    messages: list[dict[str, Any]]
    question: str | None
    unused: tuple[str, ...]


def chat_messages(messages: Sequence[Any], file_text: Callable[[str], str]) -> ChatMessages:
    """The messages of a chat completion. Raises ApiError 400 for invalid ones."""
    found: list[dict[str, Any]] = []
    question, unused = None, set[str]()
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise ApiError(400, f"{place} is {shown(message, 80)}; give an object with role and content", param=place)
        for name, remedy in _UNREAD.items():
            if message.get(name):
                raise ApiError(400, f"{place} has {name}; {remedy}", param=place)
        text = message.get("content")
        if text is None and message.get("role") != "assistant":
            raise ApiError(400, f"{place} has no content; give a text or a list of parts", param=place)
        content = content_text(message.get("refusal") if text is None else text, place, file_text)
        known = _FIELDS if message.get("role") == "tool" else _FIELDS - {"name"}
        unused |= {f"messages.{key}" for key, value in message.items() if value and key not in known}
        kept = {key: value for key, value in message.items() if value is not None and key != "content"}
        found.append({**kept, "content": content.text})
        if message.get("role") == "user":
            question = content.question
    return ChatMessages(found, question, tuple(sorted(unused)))
