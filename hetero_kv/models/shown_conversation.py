"""Shows a conversation to a chat template, in the forms that templates accept, with stand-ins for its texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from hetero_kv.errors import HeteroKVError
from hetero_kv.models.json_values import texts_of
from hetero_kv.models.messages import END_OF_THOUGHT, THOUGHT, Message, Messages, read_messages
from hetero_kv.models.stand_ins import Shown, StandIns
from hetero_kv.models.templates import TemplateError, TemplateLimitError, rendered_chat, template_source
from hetero_kv.models.text_encoding import PromptPiece
from hetero_kv.models.tool_definitions import Tools, completed, with_stand_ins

# The names that templates have for a message's thought.
_REASONING = re.compile(r"[.'\"](reasoning_content|reasoning|thinking)\b")
# A template that itself separates thoughts from answers.
_SPLITS_THOUGHTS = re.compile(rf"split\(\s*['\"]{END_OF_THOUGHT}|['\"]{END_OF_THOUGHT}['\"] in ")
_ROLES = re.compile(r"['\"]([a-z_]{1,32})['\"]")
# A value that templates compare a variable with, like "high".
_WORD = re.compile(r"[\w.-]{1,32}")
_CHANGES = (
    "the model's chat template omits or changes the text of messages, so text cannot be distinguished from control "
    "tokens; give the tokenizer a chat_template that writes messages unchanged"
)


class TemplateForm(NamedTuple):
    """How a conversation is shown to a template.

    Attributes:
        system: where system messages stand, see `_placed`.
        function: whether functions without description or parameters get empty ones.
        thought: "apart", or the content beside tool calls "joined" to it.
        no_content: the content of an answer that has tool calls alone.
        arguments: as "mapping", as "text", or "wrapped": text that is no JSON object in a mapping; and "printed": the
            same, where the template prints texts in Python's form.
    """

    system: str
    function: str
    thought: str
    no_content: str | None
    arguments: str


class ShownConversation:
    """A conversation on its way through a tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        messages, variables: as for `rendered`.
        functions: as `read_tools` gives them.
    """

    def __init__(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any] | Message], variables: Mapping[str, Any],
        functions: Sequence[Mapping[str, Any]],
    ) -> None:  # fmt: skip
        self._tokenizer, self._functions = tokenizer, functions
        # A conversation with earlier calls needs the template that has tools, too.
        has_calls = any(_has_calls(message) for message in messages)
        self._template = template = template_source(tokenizer, has_tools=bool(functions) or has_calls)
        known_roles = _ROLES.findall(template)
        read = read_messages(messages, known_roles)
        self._reasoning_names = sorted(set(_REASONING.findall(template)))
        if self._reasoning_names or _SPLITS_THOUGHTS.search(template):
            read = [message.without_thought for message in read]
        elif any(message.reasoning for message in read):
            read = [replace(message, reasoning="") for message in read]
        if "developer" not in known_roles:
            read = [replace(message, role="system") if message.role == "developer" else message for message in read]
        self._messages = read
        self._calls = [call for message in read for call in message.calls]
        names = [*texts_of(functions), *(call.name for call in self._calls), *(message.name for message in read)]
        in_calls = [
            (text, number)
            for number, call in enumerate(self._calls, start=1)
            if isinstance(call.arguments, Mapping)
            for text in texts_of(call.arguments)
        ]
        self._stand_ins = stand_ins = StandIns([*((name, 0) for name in names), *in_calls], template)
        self._contents = [stand_ins.text(message.content) for message in read]
        self._thoughts = [stand_ins.text(message.reasoning) for message in read]
        self._arguments = [stand_ins.text(call.text) for call in self._calls]
        self._variables = with_stand_ins(dict(variables), self._shown_value)

    def _shown_value(self, text: str) -> str:
        """A text of a variable, or its stand-in unless it is a word, which the template may compare with others."""
        is_word = _WORD.fullmatch(text) and text not in self._tokenizer.get_added_vocab()
        return text if is_word else self._stand_ins.text(text)

    def choices(self, places_system: bool) -> list[TemplateForm]:
        """The ways in which the template may be shown the conversation, the first ones first."""
        messages, system = self._messages, ["given"]
        roles = [message.role for message in messages]
        if places_system and "system" in roles:
            system += ["first", "user"]
        has_both = any(message.calls and message.content and message.reasoning for message in messages)
        has_neither = any(message.calls and not message.content for message in messages)
        is_wrong = any(isinstance(call.arguments, str) for call in self._calls)
        is_complete = all(dict(function) == completed(function) for function in self._functions)
        return [
            TemplateForm(*choice)
            for choice in product(
                system,
                ["given"] if is_complete else ["given", "completed"],
                ["apart", "joined"] if has_both else ["apart"],
                [None, ""] if has_neither or has_both else [None],
                ["mapping", "text", *(["wrapped"] if is_wrong else []), "printed"] if self._calls else ["mapping"],
            )
        ]

    def pieces(self, choice: TemplateForm, after: int | None) -> list[PromptPiece]:
        """The pieces of the rendering of the conversation in one of its forms.

        Raises HeteroKVError as `rendered`.
        """
        functions = self._functions if choice.function == "given" else list(map(completed, self._functions))
        shown_functions = [with_stand_ins(function, self._stand_ins.name, is_schema=True) for function in functions]
        # Templates look at what mappings have, so nothing is shown that is not there.
        shown_arguments = [self._shown_arguments(number, choice) for number in range(len(self._calls))]
        text = self._rendering(choice, shown_functions, shown_arguments)
        for arguments, stand_in in zip(shown_arguments, self._arguments, strict=True):
            if isinstance(arguments, dict) and arguments:
                for ensure_ascii in (False, True):
                    text = text.replace(json.dumps(arguments, ensure_ascii=ensure_ascii), stand_in)
        shown = self._stand_ins.replaced(text)
        if shown is None:
            raise HeteroKVError(_CHANGES)
        found = {each.stand_in for each in shown}
        if not found.issuperset(self._stand_ins.name(function["name"]) for function in functions):
            raise HeteroKVError(
                "the model's chat template has no notion of tools; leave out the tools, or use a model whose template "
                "has them"
            )
        self._require_calls(shown, shown_arguments, may_print=choice.arguments == "printed")
        last = len(self._messages) - 1
        required = range(last + 1) if after is None else [last]
        if not all(
            self._contents[number] in found or not self._contents[number] or self._messages[number].calls
            for number in required
        ) and (after is None or self._contents[after] in found):
            raise HeteroKVError(_CHANGES)
        if after is not None:
            if self._contents[after] not in found:
                raise HeteroKVError(
                    "the model's chat template omits earlier answers, so a conversation cannot continue; use /reset "
                    "before each question"
                )
            place = max(place for place, each in enumerate(shown) if each.stand_in == self._contents[after])
            shown = shown[place + 1 :]
        return [each.piece for each in shown]

    def _require_calls(self, shown: Sequence[Shown], shown_arguments: Sequence[Any], *, may_print: bool) -> None:
        """Raise HeteroKVError where the template omits a call or prints arguments in Python's form."""
        found = {each.stand_in: each for each in shown}
        for call, arguments, whole in zip(self._calls, shown_arguments, self._arguments, strict=True):
            needed = set(texts_of(arguments)) - {""}
            if self._stand_ins.name(call.name) not in found or (whole not in found and not needed <= found.keys()):
                raise HeteroKVError(
                    "the model's chat template omits earlier tool calls; leave them out with their results, or use a "
                    "model whose template has tools"
                )
            if not may_print and any(name in found and found[name].is_python for name in needed):
                raise HeteroKVError(
                    "the model's chat template writes the arguments of tool calls otherwise than as JSON; give the "
                    "tokenizer another chat_template"
                )

    def _shown_arguments(self, number: int, choice: TemplateForm) -> Any:
        call, whole = self._calls[number], self._arguments[number]
        if choice.arguments == "text":
            return whole
        if isinstance(call.arguments, str):
            return {"arguments": whole} if choice.arguments in ("wrapped", "printed") else whole
        return with_stand_ins(call.arguments, lambda text: self._stand_ins.name(text, number + 1))

    def _rendering(self, choice: TemplateForm, functions: Sequence[Mapping[str, Any]], arguments: Sequence[Any]) -> str:
        messages, remaining = [], iter(arguments)
        for message, numbers in _placed(self._messages, choice.system):
            content: str | None = "\n\n".join(self._contents[number] for number in numbers if self._contents[number])
            thought = self._thoughts[numbers[0]]
            if choice.thought == "joined" and message.calls and content and thought:
                thought, content = f"{thought}\n\n{content}", ""
            if thought and not self._reasoning_names:
                content, thought = f"{THOUGHT}\n{thought}\n{END_OF_THOUGHT}\n\n{content}", ""
            shown: dict[str, Any] = {"role": message.role, "content": content}
            if thought:
                shown |= dict.fromkeys(self._reasoning_names, thought)
            if message.calls:
                shown["content"] = content or choice.no_content
                shown["tool_calls"] = [
                    {
                        **({"id": self._stand_ins.identifier(call.id)} if call.id else {}),
                        "type": "function",
                        "function": {"name": self._stand_ins.name(call.name), "arguments": next(remaining)},
                    }
                    for call in message.calls
                ]
            if message.call_id:
                shown["tool_call_id"] = self._stand_ins.identifier(message.call_id)
            if message.name:
                shown["name"] = self._stand_ins.name(message.name)
            messages.append(shown)
        tools = [{"type": "function", "function": function} for function in functions]
        return _render(self._tokenizer, self._template, messages, self._variables, tools or None)


def _has_calls(message: Any) -> bool:
    if isinstance(message, Message):
        return message.role == "tool" or bool(message.calls)
    return isinstance(message, Mapping) and (message.get("role") == "tool" or bool(message.get("tool_calls")))


def _placed(messages: Sequence[Message], system: str) -> list[tuple[Message, list[int]]]:
    """The messages, each with the numbers of those whose contents it has.

    Args:
        messages: the conversation.
        system: where system messages stand: as "given"; "first", those at the beginning as one, later ones in the
            user's message at their place; or all in the "user"'s messages.
    """
    placed: list[tuple[Message, list[int]]] = []
    was_moved = False
    for number, message in enumerate(messages):
        is_beginning = all(each.role == "system" for each, _ in placed)
        is_moved = message.role == "system" and (system == "user" or (system == "first" and not is_beginning))
        role = "user" if is_moved else message.role
        joins = system != "given" and bool(placed) and placed[-1][0].role == role
        if joins and (role == "system" or (role == "user" and (is_moved or was_moved))):
            placed[-1][1].append(number)
            was_moved = was_moved or is_moved
        else:
            placed.append((replace(message, role=role), [number]))
            was_moved = is_moved
    return placed


def _render(
    tokenizer: Any, template: str, messages: Messages, variables: Mapping[str, Any], tools: Tools | None
) -> str:
    try:
        return rendered_chat(
            tokenizer, messages, add_generation_prompt=True, variables=variables, tools=tools, template=template
        )
    except TemplateLimitError:
        raise
    except TemplateError as error:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise HeteroKVError(
            f"the model's chat template refuses messages of {roles}: {error.reason}; leave out --system if it refuses "
            "system messages, or give the tokenizer another chat_template"
        ) from error
