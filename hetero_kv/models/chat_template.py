"""Renders a chat template around messages without passing it their texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.models.messages import Message
from hetero_kv.models.shown_conversation import ShownConversation
from hetero_kv.models.templates import TemplateLimitError, template_source, template_variables
from hetero_kv.models.text_encoding import PromptPiece
from hetero_kv.models.tool_definitions import Tools, read_tools

#: The names of the switch in templates.
_THINKING = re.compile(r"\b(enable_thinking|(?<![.\w'\"])thinking(?=\s+(?:is\b|and\b|or\b|==|%\}|-%\})))")
_STANDARD = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


def thinking_variable(tokenizer: Any) -> str:
    """The variable of the tokenizer's chat template that switches thinking on and off.

    Raises HeteroKVError if the template has none.
    """
    found = _THINKING.search(tokenizer.get_chat_template() if tokenizer.chat_template else "")
    if found is None:
        raise HeteroKVError("the model's chat template cannot switch thinking on or off; leave --thinking out")
    return found[1]


def variables_of(tokenizer: Any) -> frozenset[str]:
    """The names of the variables that a caller may give the tokenizer's chat template, such as "reasoning_effort".

    Raises TemplateError for a template that cannot be read.
    """
    if not tokenizer.chat_template:
        return frozenset()
    sources = {template_source(tokenizer, has_tools=has_tools) for has_tools in (False, True)}
    names = frozenset.union(*map(_read_variables, sources)) - _STANDARD - tokenizer.special_tokens_map.keys()
    return frozenset(name for name in names if not name.endswith("_token"))


@lru_cache(maxsize=64)
def _read_variables(source: str) -> frozenset[str]:
    return template_variables(source)


def rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any] | Message],
    *,
    after: int | None = None,
    variables: Mapping[str, Any] | None = None,
    tools: Tools | None = None,
    places_system: bool = False,
) -> list[PromptPiece]:
    """The messages in the tokenizer's chat template, up to the start of the next answer.

    The template renders stand-ins, which are then replaced by the texts, so that no text affects the template. Where
    the template strips white space around a text, or escapes it in JSON, the text is stripped or escaped too. Arguments
    that a template writes as one JSON text keep the form in which they are given, as the model may have written them.

    Templates differ in what they accept. The conversation is shown in further forms where one is refused or its texts
    are left out: `developer` as `system`; arguments as a mapping, then as text; functions without a description or
    parameters, then with empty ones; a thought and a content with tool calls, then both as the thought. Thoughts are
    shown apart from answers, so that a template may leave earlier ones out.

    Args:
        messages: as `hetero_kv.models.messages.read_messages`.
        after: return only what follows the message with this number.
        variables: further variables of the template, of `variables_of`.
        tools: as `hetero_kv.models.messages.read_tools`.
        places_system: whether system messages may stand elsewhere where the template refuses them: the first ones
            become one, later ones a part of the user's message at their place; where it has no system messages, all do.

    Raises HeteroKVError if the template cannot be rendered, omits a message, a tool or a call, or changes a text.
    """
    conversation = ShownConversation(tokenizer, messages, variables or {}, read_tools(tools))
    first_error: HeteroKVError | None = None
    for choice in conversation.choices(places_system):
        try:
            return conversation.pieces(choice, after)
        except TemplateLimitError:
            raise
        except HeteroKVError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error
