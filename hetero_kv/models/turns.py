"""Tokenizes conversations turn by turn, so that each turn is appended to the KV cache and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.models.chat_template import Messages, rendered, thinking_variable
from hetero_kv.models.templates import TemplateError, TemplateLimitError, rendered_chat
from hetero_kv.models.text_encoding import PromptPiece, TextEncoder

#: A longer turn without a known question does not count as a question as a whole, tokens.
LONGEST_MESSAGE = 1024
_LINE_END = PromptPiece("\n")
#: The tag that begins a reasoning model's thought.
THOUGHT = "<think>"
# A tag that is no word of the vocabulary takes several tokens.
_TOKENS_OF_SIGN = 16


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

    def opened_thought(self, prompt: Sequence[int]) -> str:
        """The opened thought at a prompt's end: "<think>" and a line end, or "" if there is none."""
        end = self.tokenizer.decode(prompt[-_TOKENS_OF_SIGN:]) if self.tokenizer.chat_template else ""
        return f"{THOUGHT}\n" if end.rstrip().endswith(THOUGHT) else ""

    def text(self, text: str) -> list[int]:
        """The tokens of a text alone, without a chat template and special tokens."""
        return self._encoder.encode([PromptPiece(text)])

    def raw(self, text: str) -> list[int]:
        """The tokens of a text without a chat template, with the special tokens that the tokenizer puts around it."""
        return self._encoder.encode([PromptPiece(text)], add_special_tokens=True)

    def conversation(self, messages: Messages) -> list[int]:
        """The tokens of a whole conversation up to the start of the next answer.

        Args:
            messages: each with "role" and "content", a text; without the system message that this object has.

        Raises HeteroKVError without a chat template, for messages of another form, and as
        `hetero_kv.models.chat_template.rendered`.
        """
        if not self.tokenizer.chat_template:
            raise HeteroKVError("the model has no chat template for messages; pass it a text, which it continues")
        if not messages or isinstance(messages, str | Mapping):
            raise HeteroKVError('there are no messages; give a list of at least one, {"role": "user", "content": "…"}')
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise HeteroKVError(f"messages[{number}] is {shown(message, 80)}; give a mapping of role and content")
            for name in ("role", "content"):
                value = message.get(name)
                if not isinstance(value, str):
                    raise HeteroKVError(f"messages[{number}] has the {name} {value!r}; give a text")
        return self._encoder.encode(rendered(self.tokenizer, [*self.opening, *messages], variables=self._variables))

    def first(self, question: str) -> list[int]:
        """The tokens of a conversation's first turn up to the start of the answer."""
        if not self.tokenizer.chat_template:
            return self.raw(question)
        return self.conversation([{"role": "user", "content": question}])

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
    after = text.rpartition(ANSWER)[2]
    ids = tokenizer.encode(after, add_special_tokens=False)
    return frozenset(ids[:1]) & frozenset(tokenizer.added_tokens_decoder)
