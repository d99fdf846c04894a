"""Converts a conversation of any API to a prompt for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.models.chat_template import thinking_variable
from hetero_kv.models.messages import END_OF_THOUGHT
from hetero_kv.server.errors import ApiError
from hetero_kv.server.served import ServedModel

#: Efforts at which a model that can only switch thinking on and off does not think.
_NO_EFFORT = ("none", "minimal")
_EFFORTS = (*_NO_EFFORT, "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Dialogue:
    """A conversation, to be continued by an answer.

    Attributes:
        messages: in OpenAI's format, each with a text as content. The last one may be the beginning of the answer.
        question: the question about the last document, with which the last user's message ends; None if unknown.
        thinks: whether a reasoning model thinks; None for the template's default.
        effort: how much it thinks, a word; None for the template's default.
        variables: further variables of the template.
        tools: functions in OpenAI's format.
        unused: names of the request's fields without effect.
        thinks_field, effort_field: the names that `thinks` and `effort` have in the request, for headers and errors.
    """

    messages: Sequence[Mapping[str, Any]]
    question: str | None = None
    thinks: bool | None = None
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] = ()
    unused: tuple[str, ...] = ()
    thinks_field: str = "thinking"
    effort_field: str = "reasoning_effort"


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as tokens.

    Attributes:
        tokens: the prompt, up to where the answer continues.
        opening: the tokens before the beginning of the answer that the conversation has, unless a thought ends there.
        question: how many of the last tokens are the question; None if unknown.
        unused: names of fields without effect.
    """

    tokens: list[int]
    opening: list[int]
    question: int | None
    unused: tuple[str, ...] = ()


def prompt_of(served: ServedModel, dialogue: Dialogue) -> ChatPrompt:
    """The tokens of a conversation, in the model's chat template.

    Raises HeteroKVError as `TurnTokens.conversation`.
    """
    turns, messages = served.turns, list(dialogue.messages)
    begun = None
    if len(messages) > 1 and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls"):
        begun = messages.pop()
        if begun.get("reasoning_content"):
            raise ApiError(
                400, "the last message begins the answer, and has reasoning_content; give content alone, or end with a "
                "user's message", param="messages",
            )  # fmt: skip
    variables, unused = _variables(served, dialogue)
    tokens = turns.conversation(messages, tools=list(dialogue.tools) or None, variables=variables)
    question, opening = None, tokens
    last = messages[-1] if messages else {}
    if begun is not None:
        tokens = [*tokens, *turns.text(begun["content"])]
        # A thought that the template opens ends within such a beginning.
        opening = tokens if END_OF_THOUGHT in begun["content"] else opening
    elif last.get("role") == "user":
        try:
            question = turns.question(tokens, last["content"], dialogue.question)
        except HeteroKVError:
            # The template cannot write a single message.
            question = None
    return ChatPrompt(tokens, opening, question, (*dialogue.unused, *unused))


def _variables(served: ServedModel, dialogue: Dialogue) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's variables, and which of them it does not have.

    Raises ApiError 400 for an effort that neither the template nor OpenAI's or Anthropic's API has.
    """
    known, given = served.turns.variables, dict(dialogue.variables)
    thinks, effort, unused = dialogue.thinks, dialogue.effort, []
    if effort is not None:
        if "reasoning_effort" in known:
            given["reasoning_effort"] = effort
        elif effort not in _EFFORTS:
            raise ApiError(
                400, f"the reasoning effort is {shown(effort, 80)}; give one of {', '.join(_EFFORTS)}",
                param=dialogue.effort_field,
            )  # fmt: skip
        elif thinks is None:
            thinks = effort not in _NO_EFFORT
    if thinks is not None:
        try:
            given.setdefault(thinking_variable(served.tokenizer), thinks)
        except HeteroKVError:
            unused.append(dialogue.thinks_field if effort is None else dialogue.effort_field)
    unused += [name for name in given if name not in known]
    return {name: value for name, value in given.items() if name in known}, tuple(unused)
