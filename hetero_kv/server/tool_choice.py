"""Which tools an answer may call, must call, or may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_kv.server.chat_answers import Parser, PlainParser
from hetero_kv.server.chat_prompt import ChatPrompt, Dialogue
from hetero_kv.server.constraints import Constrained, masks_of
from hetero_kv.server.errors import ApiError
from hetero_kv.server.served import ServedModel
from hetero_kv.serving.grammar import GrammarMask


@dataclass(frozen=True)
class Choice:
    """The tools of a request.

    Attributes:
        tools: those that the model sees.
    """

    tools: tuple[Any, ...] = ()

    def shown(self, dialogue: Dialogue) -> Dialogue:
        """The conversation with the tools that the model sees."""
        return replace(dialogue, tools=self.tools)

    def masks(self, served: ServedModel, body: Constrained, count: int) -> list[GrammarMask | None]:
        """A mask for each answer. Raises as `masks_of`."""
        return list(masks_of(served, body, count))

    def parsers(self, served: ServedModel, prompt: ChatPrompt, count: int) -> Sequence[Parser]:
        """A parser for each answer."""
        return [PlainParser() for _ in range(count)]


def choice_of(served: ServedModel, tools: Sequence[Any] | None, chosen: Any, *, parallel: bool) -> Choice:
    """The choice of a request's `tools` and `tool_choice`. Raises ApiError 400 for one of unknown form."""
    if chosen not in (None, "auto", "none"):
        raise ApiError(400, f"tool_choice is {chosen!r}; give auto or none", param="tool_choice")
    return Choice(() if chosen == "none" else tuple(tools or ()))
