"""Turns of a conversation as tokens, so that each turn is appended to what is stored and nothing is processed twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetero_kv.models.chat_template import rendered, thinking_variable
from hetero_kv.models.text_encoding import Piece, TextEncoder

#: A longer message of which nobody says where its question begins is not taken for a question.
LONGEST_MESSAGE = 1024
_LINE_END = Piece("\n")
#: What begins a reasoning model's thought.
THOUGHT = "<think>"
# A sign that is no word of the vocabulary takes several tokens.
_TOKENS_OF_SIGN = 16


def about(document: str, question: str) -> str:
    """The message that asks about a document: the document, a blank line, the question."""
    return "\n\n".join((document.rstrip("\n"), question))


class TurnTokens:
    """The tokens that a chat template puts around questions.

    Control tokens come from the template alone: `<|im_end|>` in a question or a system message is text like any other.

    Args:
        tokenizer: a transformers tokenizer; without a chat template the text is taken as it is.
        system: the system message, or None for the template's own.
        thinks: whether a reasoning model thinks before it answers; None where the template decides.

    Raises HeteroKVError where `thinks` is given, and the template cannot say so.
    """

    def __init__(self, tokenizer: Any, system: str | None = None, thinks: bool | None = None) -> None:
        self.tokenizer = tokenizer
        self._variables = {} if thinks is None else {thinking_variable(tokenizer): thinks}
        self.opening = [{"role": "system", "content": system}] if system else []
        self._encoder = TextEncoder(tokenizer)

    def opened_thought(self, prompt: Sequence[int]) -> str:
        """What stands at a prompt's end to have the model go on thinking: "<think>" and a line's end, or nothing."""
        end = self.tokenizer.decode(prompt[-_TOKENS_OF_SIGN:]) if self.tokenizer.chat_template else ""
        return f"{THOUGHT}\n" if end.rstrip().endswith(THOUGHT) else ""

    def text(self, text: str) -> list[int]:
        """The tokens of a text alone, without a chat template and special tokens."""
        return self._encoder.encode([Piece(text)])

    def raw(self, text: str) -> list[int]:
        """The tokens of a text without a chat template, with the special tokens that the tokenizer puts around it."""
        return self._encoder.encode([Piece(text)], add_special_tokens=True)

    def first(self, question: str) -> list[int]:
        """The tokens of a conversation's beginning up to where the answer starts."""
        if not self.tokenizer.chat_template:
            return self.raw(question)
        messages = [*self.opening, {"role": "user", "content": question}]
        return self._encoder.encode(rendered(self.tokenizer, messages, variables=self._variables))

    def following(self, question: str, last_token: int) -> list[int]:
        """The tokens that follow an answer up to where the next one starts.

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
        self, turn: Sequence[int], message: str, asked: str | None = None, *, is_raw: bool = False
    ) -> int | None:
        """How many of a turn's last tokens are its question, with what the template writes behind it.

        A token that the question shares with what stands before it counts.

        Args:
            turn: the turn's tokens, as `first`, `following` or `raw` gave them.
            message: its text.
            asked: what the message ends with, which asks about the rest; None where nobody says. Then all of it is the
                question, but for one of more than `LONGEST_MESSAGE` tokens: None is returned.
            is_raw: whether the turn is without a chat template.
        """
        if asked is None:
            if len(turn) > LONGEST_MESSAGE:
                return None
            asked = message
        pieces = [Piece(asked)]
        if self.tokenizer.chat_template and not is_raw:
            messages = [*self.opening, {"role": "user", "content": asked}]
            pieces = rendered(self.tokenizer, messages, variables=self._variables)[-2:]
        # Behind a line's end, as it is in the turn: some tokenizers begin a text otherwise than they go on.
        end = self._encoder.encode([_LINE_END, *pieces])
        number = len(end) - len(self._encoder.encode([_LINE_END]))
        pairs = zip(reversed(turn), reversed(end), strict=False)
        same = next((count for count, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(turn), len(end)))
        if same == 0:
            return None
        return min(number if same >= number else same + 1, len(turn))
