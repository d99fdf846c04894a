"""An answer as its tokens come: its text, and why it ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from hetero_kv.serving.sampler import Choice
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.stream import FinishReason, Piece
from hetero_kv.serving.text_stream import TextStream


class GrowingAnswer:
    """One answer, token by token.

    Args:
        tokenizer: a transformers tokenizer.
        params: what ends the answer besides `ends`.
        ends: tokens that end it.
        stop_tokens: stop texts that are control tokens, by id.
        limit: the longest answer that fits, tokens.
        markers: ids of control tokens and their texts, which pieces give separately from text.

    Attributes:
        pieces: its tokens so far.
        limit: the longest answer that fits, tokens.
    """

    def __init__(
        self, tokenizer: Any, params: SamplingParams, limit: int, *, ends: Collection[int] = (),
        stop_tokens: Mapping[int, str] = MappingProxyType({}), markers: Mapping[int, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.pieces: list[Piece] = []
        self.limit = limit
        self._max_new_tokens, self._ends = params.max_new_tokens, ends
        self._stop_tokens, self._markers = stop_tokens, dict(markers)
        self._text = TextStream(tokenizer, params.stop, markers)
        self._stop_token: str | None = None

    @property
    def text(self) -> str:
        """Its text as far as it is certain, without special tokens, markers and the stop text."""
        return self._text.text

    @property
    def written_stop(self) -> str | None:
        """The stop text that ended it, if ordinary tokens spelled it; None for a control token."""
        return self._text.found

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended it."""
        return self._stop_token if self.written_stop is None else self.written_stop

    def take(self, choice: Choice) -> FinishReason | None:
        """Append a token. Returns why the answer ends with it; None if it goes on."""
        reason: FinishReason | None = "end" if choice.token in self._ends else None
        text = self._text.add(choice.token)
        if choice.token in self._stop_tokens and self.written_stop is None:
            text += self._text.end()
            self._stop_token = self._stop_tokens[choice.token]
        marker = self._markers.get(choice.token, "") if self.stop_text is None else ""
        self.pieces.append(Piece(choice.token, text, choice.logprob, choice.alternatives, marker))
        if self.stop_text is not None:
            return "stop_text"
        if reason is None and len(self.pieces) == self.limit:
            return "max_new_tokens" if self.limit == self._max_new_tokens else "full"
        return reason

    def complete(self, reason: FinishReason) -> FinishReason:
        """End its text: no token follows. Returns why the answer ended, "stop_text" or `reason`."""
        self._text.end()
        return reason if self.stop_text is None else "stop_text"
