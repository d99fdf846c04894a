"""A tokenizer for tiny models: a token's text is its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class Numbers:
    """Writes tokens as numbers with a space behind each; it has no chat template and no special tokens."""

    chat_template = None
    added_tokens_decoder: ClassVar[dict[int, object]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(97)}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A token per letter, for policies with a text of their own."""
        return [(ord(letter) - 90) % 97 for letter in text]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token} " for token in tokens)
