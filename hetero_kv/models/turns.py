"""Turns of a conversation as tokens, so that each turn is appended to what is stored and nothing is processed twice."""

from __future__ import annotations

from typing import Any

from hetero_kv.errors import HeteroKVError

# Stands for the answer while a template is rendered; no template or text contains it.
_ANSWER = "\u2402answer\u2403"


class TurnTokens:
    """The tokens that a chat template puts around questions.

    Args:
        tokenizer: a transformers tokenizer; without a chat template the text is taken as it is.
        system: the system message, or None for the template's own.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.opening = [{"role": "system", "content": system}] if system else []

    def first(self, question: str) -> list[int]:
        """The tokens of a conversation's beginning up to where the answer starts."""
        if not self.tokenizer.chat_template:
            return self.tokenizer(question)["input_ids"]
        return self._encoded(self._rendered([{"role": "user", "content": question}]))

    def following(self, question: str, last_token: int) -> list[int]:
        """The tokens that follow an answer up to where the next one starts.

        Args:
            last_token: the answer's last token; an end-of-turn token that the template would add is not repeated.
        """
        if not self.tokenizer.chat_template:
            return self._encoded(question)
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": question},
        ]
        _, found, after = self._rendered(messages).partition(_ANSWER)
        if not found:
            raise HeteroKVError(
                "the model's chat template leaves out earlier answers, so that a conversation cannot be continued; "
                "use /reset before each question"
            )
        tokens = self._encoded(after)
        is_repeated = tokens[0] == last_token and last_token in self.tokenizer.all_special_ids
        return tokens[1:] if is_repeated else tokens

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(
            [*self.opening, *messages], tokenize=False, add_generation_prompt=True
        )

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
