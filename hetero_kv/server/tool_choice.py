"""The tools that an answer may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.server.chat_prompt import ChatPrompt, Dialogue
from hetero_kv.server.constraints import Constrained, constraint_of, masks_of
from hetero_kv.server.errors import ApiError
from hetero_kv.server.served import ServedModel
from hetero_kv.serving.answers import AnswerParser, ToolChoice, chosen_tool
from hetero_kv.serving.grammar import GrammarMask


@dataclass(frozen=True)
class RequestTools:
    """The tools of a request, in OpenAI's format.

    Attributes:
        tools: those in the prompt.
        chosen: "none", "auto", "required", or the function that must be called.
        is_parallel: whether an answer may have several calls.
        is_strict: whether the request wants calls to keep their schemas.
    """

    tools: tuple[Any, ...] = ()
    chosen: ToolChoice = "auto"
    is_parallel: bool = True
    is_strict: bool = False

    @property
    def ends_with_call(self) -> bool:
        """Whether an answer ends with its first call. A grammar sees to that where a call is required."""
        return self.chosen == "auto" and not self.is_parallel

    @property
    def unused(self) -> list[str]:
        """Names of fields without effect: schemas bind only calls that are required."""
        return ["tools.strict (tool_choice is auto)"] if self.is_strict and self.chosen == "auto" else []

    def shown(self, dialogue: Dialogue) -> Dialogue:
        """The conversation with the tools of the prompt."""
        return replace(dialogue, tools=self.tools)

    def masks(self, served: ServedModel, prompt: ChatPrompt, body: Constrained, count: int) -> list[GrammarMask | None]:
        """A mask for each answer. A JSON value that the request requires may give way to calls that it allows.

        Raises ApiError 400 for two constraints, else as `masks_of`.
        """
        constraint, instead, chosen = constraint_of(body), None, self.chosen
        if chosen == "auto" and self.tools and constraint is not None and constraint[0] in ("schema", "object"):
            instead, chosen = {"type": "object"} if constraint[0] == "object" else constraint[1], "required"
        elif chosen in ("none", "auto"):
            return list(masks_of(served, body, count, prompt.opening))
        elif constraint is not None:
            raise ApiError(400, "tool_choice and response_format constrain one answer; give one of them")
        grammar = served.form.call_grammar(
            prompt.opening, self.tools, chosen, is_parallel=self.is_parallel, instead=instead
        )
        assert grammar is not None
        return [served.grammars.lark(grammar) for _ in range(count)]

    def parsers(self, served: ServedModel, prompt: ChatPrompt, count: int) -> Sequence[AnswerParser]:
        """A parser for each answer."""
        tools = () if self.chosen == "none" else self.tools
        return [served.form.parser(prompt.opening, tools) for _ in range(count)]


def choice_of(tools: Sequence[Any] | None, chosen: Any, *, parallel: bool, strict: bool) -> RequestTools:
    """The choice of a request's `tools` and `tool_choice`.

    Args:
        parallel, strict: as `RequestTools` has them.

    Raises ApiError 400 for an invalid choice, or an unknown tool.
    """
    given = tuple(tools or ())
    names = [str(function.get("name")) for each in given if isinstance(function := _function(each), dict)]
    chosen = "auto" if chosen is None else chosen
    try:
        chosen_tool(chosen, names)
    except HeteroKVError as error:
        raise ApiError(400, str(error), param="tool_choice") from error
    # Tools that must not be called are not in the prompt. A named function is called once, as in OpenAI's API.
    return RequestTools(() if chosen == "none" else given, chosen, parallel and isinstance(chosen, str), strict)


def has_strict(tools: Sequence[Any] | None) -> bool:
    """Whether one of the tools, in any API's form, is strict."""
    functions = [function for tool in tools or () for function in (tool, _function(tool)) if isinstance(function, dict)]
    return any(function.get("strict") is True for function in functions)


def _function(tool: Any) -> Any:
    return tool.get("function") if isinstance(tool, dict) else None
