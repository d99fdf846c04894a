"""Renders a chat template around messages without passing it their texts."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.models.templates import TemplateError, TemplateLimitError, rendered_chat
from hetero_kv.models.text_encoding import PromptPiece

# Characters that templates are known to change in a message: quotes, entities, line ends, letters of either case.
_SAMPLE = " 'Aé\"<&>\\\n{}| "
# White space that no template writes; it shows whether the template strips a message's white space.
_SPACE = "\u2003"

Messages = Sequence[Mapping[str, str]]


#: The names of the switch in templates.
_THINKING = re.compile(r"\b(enable_thinking|(?<![.\w'\"])thinking(?=\s+(?:is\b|and\b|or\b|==|%\}|-%\})))")


def thinking_variable(tokenizer: Any) -> str:
    """The variable of the tokenizer's chat template that switches thinking on and off.

    Raises HeteroKVError if the template has none.
    """
    found = _THINKING.search(tokenizer.get_chat_template() if tokenizer.chat_template else "")
    if found is None:
        raise HeteroKVError("the model's chat template cannot switch thinking on or off; leave --thinking out")
    return found[1]


def rendered(
    tokenizer: Any, messages: Messages, *, after: int | None = None, variables: Mapping[str, Any] | None = None
) -> list[PromptPiece]:
    """The messages in the tokenizer's chat template, up to the start of the next answer.

    The template renders placeholders, which are then replaced by the messages' texts, so that no text affects the
    template. Where the template strips white space around a message, the text's is stripped too.

    Args:
        messages: each with "role" and "content".
        after: return only what follows the message with this number.
        variables: further variables of the template.

    Raises HeteroKVError if the template cannot be rendered, omits a message or changes its text.
    """
    key = secrets.token_hex(8)
    stand_ins = [f"{key}-{number}{_SAMPLE}{number}-{key}" for number in range(len(messages))]
    shown = [
        # An empty text is shown as such: templates ask whether there is one.
        {**message, "content": message["content"] and f"{_SPACE}{name}{_SPACE}"}
        for message, name in zip(messages, stand_ins, strict=True)
    ]
    # [written, space, stand-in, space, written, …, written]
    parts = re.split(
        f"({_SPACE}?)({'|'.join(map(re.escape, stand_ins))})({_SPACE}?)", _render(tokenizer, shown, variables)
    )
    if after is not None:
        if stand_ins[after] not in parts:
            raise HeteroKVError(
                "the model's chat template omits earlier answers, so a conversation cannot continue; use /reset before "
                "each question"
            )
        parts = parts[len(parts) - parts[::-1].index(stand_ins[after]) + 1 :]
    is_missing = messages[-1]["content"] and stand_ins[-1] not in parts
    if is_missing or any(key in written.casefold() for written in parts[::4]):
        raise HeteroKVError(
            "the model's chat template changes the text of messages, so text cannot be distinguished from control "
            "tokens; give the tokenizer a chat_template that writes messages unchanged"
        )
    pieces = [PromptPiece(parts[0], is_template=True)]
    for before, name, behind, written in zip(*(parts[first::4] for first in (1, 2, 3, 4)), strict=True):
        content = messages[stand_ins.index(name)]["content"]
        content = content if before else content.lstrip()
        pieces += [PromptPiece(content if behind else content.rstrip()), PromptPiece(written, is_template=True)]
    return pieces


def _render(tokenizer: Any, messages: Messages, variables: Mapping[str, Any] | None) -> str:
    try:
        return rendered_chat(tokenizer, messages, add_generation_prompt=True, variables=variables)
    except TemplateLimitError:
        raise
    except TemplateError as error:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise HeteroKVError(
            f"the model's chat template refuses messages of {roles}: {error.reason}; leave out --system if it refuses "
            "system messages, or give the tokenizer another chat_template"
        ) from error
