"""Turns of a conversation as tokens, so that each turn is appended to what is stored and nothing is processed twice."""

from __future__ import annotations

from typing import Any

from hetero_kv.models.chat_template import rendered
from hetero_kv.models.text_encoding import Piece, TextEncoder


class TurnTokens:
    """The tokens that a chat template puts around questions.

    Control tokens come from the template alone: `<|im_end|>` in a question or a system message is text like any other.

    Args:
        tokenizer: a transformers tokenizer; without a chat template the text is taken as it is.
        system: the system message, or None for the template's own.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.opening = [{"role": "system", "content": system}] if system else []
        self._encoder = TextEncoder(tokenizer)

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
        return self._encoder.encode(rendered(self.tokenizer, messages))

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
        tokens = self._encoder.encode(rendered(self.tokenizer, messages, after=len(messages) - 2))
        is_repeated = tokens[0] == last_token and last_token in self._encoder.control_ids
        return tokens[1:] if is_repeated else tokens
