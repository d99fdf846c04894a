"""How fast prompts pass, as other machines are told."""

from __future__ import annotations

from collections import deque
from weakref import ref

#: The fewest computed tokens of a prompt that counts. Few tokens behind a known beginning take about as long as a
#: step: by them an engine that has many beginnings would seem slow, and would get no new prompts.
FEWEST = 128
# So many of the last prompts count.
_LAST = 8


class PromptSpeed:
    """Tokens per second of the fastest of the last prompts, so that one that was disturbed does not count."""

    def __init__(self) -> None:
        # A cancelled prompt must not stay in memory.
        self._prompt: ref[object] | None = None
        self._tokens, self._seconds = 0, 0.0
        self._token_s: deque[float] = deque(maxlen=_LAST)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of prompts that pass in a second; None before the first prompt that counts."""
        return 1 / min(self._token_s) if self._token_s else None

    def passed(self, prompt: object, tokens: int, seconds: float, is_last: bool) -> None:
        """A part of a prompt has passed.

        Args:
            prompt: tells one prompt's parts from another's.
            tokens: of the part; decoded tokens beside it included.
        """
        if self._prompt is None or prompt is not self._prompt():
            self._prompt, self._tokens, self._seconds = ref(prompt), 0, 0.0
        self._tokens += tokens
        self._seconds += seconds
        if is_last:
            if self._tokens >= FEWEST:
                self._token_s.append(self._seconds / self._tokens)
            self._prompt = None
