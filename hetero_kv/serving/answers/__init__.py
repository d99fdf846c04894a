"""Answers as thoughts, content and tool calls: `AnswerForm` of a model, and each family's form in a file of its own.

form = AnswerForm(engine.tokenizer)
prompt = engine.encode(messages, tools=tools)
parser = form.parser(prompt, tools)
stream = engine.generate(prompt, sampling, markers=parser.markers)
for piece in stream:
    events = parser.add(piece)
events = parser.end(stream.result().text)
"""

from __future__ import annotations

from hetero_kv.serving.answers import deepseek, glm, harmony, hermes, llama, mistral, qwen_coder  # noqa: F401
from hetero_kv.serving.answers.answer import Answer, Call
from hetero_kv.serving.answers.answer_format import format_names
from hetero_kv.serving.answers.events import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning
from hetero_kv.serving.answers.parser import AnswerForm, AnswerParser, ToolChoice, chosen_tool

__all__ = [
    "Answer",
    "AnswerForm",
    "AnswerParser",
    "Call",
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "Content",
    "Event",
    "Reasoning",
    "ToolChoice",
    "chosen_tool",
    "format_names",
]
