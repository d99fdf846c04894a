"""Tokenizes conversations turn by turn, so that each turn is appended to the KV cache and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.models.chat_template import rendered, thinking_variable, variables_of
from hetero_kv.models.messages import NO_MESSAGES, Messages, read_messages
from hetero_kv.models.templates import TemplateError, TemplateLimitError, rendered_chat
from hetero_kv.models.text_encoding import PromptPiece, TextEncoder
from hetero_kv.models.tool_definitions import Tools

#: A longer turn without a known question does not count as a question as a whole, tokens.
LONGEST_MESSAGE = 1024
_LINE_END = PromptPiece("\n")


def about(document: str, question: str) -> str:
    """A message with a question about a document: the document, a blank line, the question."""
    return "\n\n".join((document.rstrip("\n"), question))


class TurnTokens:
    """The tokens that a chat template puts around questions.

    Control tokens come from the template alone: `<|im_end|>` in a question or a system message is plain text.

    Args:
        tokenizer: a transformers tokenizer; without a chat template the text is used unchanged.
        system: the system message; None for the template's default.
        thinks: whether a reasoning model thinks before it answers; None for the template's default.

    Raises HeteroKVError if `thinks` is not None and the template has no such switch.
    """

    def __init__(self, tokenizer: Any, system: str | None = None, thinks: bool | None = None) -> None:
        self.tokenizer = tokenizer
        self._variables = {} if thinks is None else {thinking_variable(tokenizer): thinks}
        self.opening = [{"role": "system", "content": system}] if system else []
        self._encoder = TextEncoder(tokenizer)

    def text(self, text: str) -> list[int]:
        """The tokens of a text alone, without a chat template and special tokens."""
        return self._encoder.encode([PromptPiece(text)])

    def raw(self, text: str) -> list[int]:
        """The tokens of a text without a chat template, with the special tokens that the tokenizer puts around it."""
        return self._encoder.encode([PromptPiece(text)], add_special_tokens=True)

    def conversation(
        self, messages: Messages, *, tools: Tools | None = None, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The tokens of a whole conversation, in the form of OpenAI's API, up to the start of the next answer.

        Control tokens come from the template alone: one that is spelled in a message, a thought, a tool's result, the
        names, descriptions or schemas of tools, or a call's arguments is plain text.

        `developer` messages are system messages where the template has no such role. Where it refuses system messages
        anywhere but at the beginning, the first ones become one, and each later one a part of the user's message at its
        place, so that what stands before it stays as it is. Where it has none, all of them do. Messages whose roles do
        not alternate are refused as the template refuses them. Where the template leaves out thoughts, be they in
        "reasoning_content" or before `</think>` in the content, they are left out.

        Args:
            messages: as `hetero_kv.models.messages.read_messages`; without the system message that this object has.
            tools: functions that the model may call, each {"type": "function", "function": {"name": …,
                "description": …, "parameters": JSON schema}}; the template named "tool_use" has precedence for them.
            variables: values for variables of the template, such as {"reasoning_effort": "high"}. A word is given to
                the template as it is; any other text is a text like a message's.

        Raises HeteroKVError without a chat template, for messages, tools and variables of another form, for variables
        that the template does not have, for tools where it has no notion of them, and as
        `hetero_kv.models.chat_template.rendered`.
        """
        return self._encoded(messages, tools, variables, places_system=True)

    @property
    def variables(self) -> frozenset[str]:
        """The variables of the chat template, such as "enable_thinking" and "reasoning_effort"."""
        return variables_of(self.tokenizer)

    def _encoded(
        self, messages: Messages, tools: Tools | None = None, variables: Mapping[str, Any] | None = None, *,
        places_system: bool,
    ) -> list[int]:  # fmt: skip
        if not self.tokenizer.chat_template:
            raise HeteroKVError("the model has no chat template for messages; pass it a text, which it continues")
        for name in variables or ():
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise HeteroKVError(f"the model's chat template has no variable {shown(name, 80)}; it has: {known}")
        if not messages or isinstance(messages, str | Mapping):
            raise HeteroKVError(NO_MESSAGES)
        return self._encoder.encode(
            rendered(
                self.tokenizer,
                [*read_messages(self.opening), *messages] if self.opening else messages,
                variables={**self._variables, **(variables or {})},
                tools=tools,
                places_system=places_system,
            )
        )

    def first(self, question: str) -> list[int]:
        """The tokens of a conversation's first turn up to the start of the answer."""
        if not self.tokenizer.chat_template:
            return self.raw(question)
        return self._encoded([{"role": "user", "content": question}], places_system=False)

    def following(self, question: str, last_token: int) -> list[int]:
        """The tokens after an answer up to the start of the next one.

        Args:
            last_token: the answer's last token; an end-of-turn token that the template would add is not repeated.
        """
        if not self.tokenizer.chat_template:
            return self.text(question)
        messages = [
            *self.opening,
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!"},
            {"role": "user", "content": question},
        ]
        tokens = self._encoder.encode(
            rendered(self.tokenizer, messages, after=len(messages) - 2, variables=self._variables)
        )
        is_repeated = tokens[0] == last_token and last_token in self._encoder.control_ids
        return tokens[1:] if is_repeated else tokens

    def question(
        self, turn: Sequence[int], message: str, question: str | None = None, *, is_raw: bool = False
    ) -> int | None:
        """The number of a turn's last tokens that are its question and the template's text after it.

        A token that spans the start of the question counts.

        Args:
            turn: the turn's tokens, from `first`, `following` or `raw`.
            message: the turn's message.
            question: the question, with which the message ends; None if unknown. Then the whole message is the
                question, unless the turn has more than `LONGEST_MESSAGE` tokens.
            is_raw: whether the turn is without a chat template.

        Returns None if there is no question of known length.
        """
        if question is None:
            if len(turn) > LONGEST_MESSAGE:
                return None
            question = message
        pieces = [PromptPiece(question)]
        if self.tokenizer.chat_template and not is_raw:
            messages = [*self.opening, {"role": "user", "content": question}]
            pieces = rendered(self.tokenizer, messages, variables=self._variables)[-2:]
        # After a line end, as in the turn: some tokenizers encode the start of a text differently.
        end = self._encoder.encode([_LINE_END, *pieces])
        number = len(end) - len(self._encoder.encode([_LINE_END]))
        pairs = zip(reversed(turn), reversed(end), strict=False)
        same = next((count for count, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(turn), len(end)))
        if same == 0:
            return None
        return min(number if same >= number else same + 1, len(turn))


ANSWER = "ANSWER"


def end_of_turn_ids(tokenizer: Any) -> frozenset[int]:
    """The token that the chat template writes after an assistant's answer, if it is an added token; else empty.

    A chat model ends its turn with this token, while its metadata often names only the token that ends a document.

    Raises:
        TemplateLimitError: the template exceeds a limit.
    """
    if not tokenizer.chat_template:
        return frozenset()
    conversation = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = rendered_chat(tokenizer, conversation)
    except TemplateLimitError:
        raise
    except TemplateError:
        return frozenset()  # the template requires another conversation; the metadata's tokens remain
    _, answer, after = text.rpartition(ANSWER)
    if not answer:
        return frozenset()  # what the template writes instead says nothing of the answer's end
    ids = tokenizer.encode(after, add_special_tokens=False)
    return frozenset(ids[:1]) & frozenset(tokenizer.added_tokens_decoder)
