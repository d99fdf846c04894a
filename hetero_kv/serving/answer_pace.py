"""When requests are due for their next tokens while the forward of a long prompt goes on."""

from __future__ import annotations

import time

from hetero_kv.serving.turns import NO_OTHERS, Others

# A chunk has at least so many tokens. Smaller ones leave products too few rows to be worth their weights.
_LEAST = 64
# So many times a prompt could pause between two tokens of others, at least: chunks that are too large for it are cut.
_PAUSES = 5
# The planned share of the target: one in a hundred steps takes longer than the mean by the rest.
_PLANNED = 0.94
# How fast the longest time between two pauses is forgotten.
_FORGOTTEN = 0.05


class AnswerPace:
    """The time between two tokens of the requests that are being answered.

    Args:
        longest_gap_s: the target for it, seconds.

    Attributes:
        token_s: the longest time between two pauses of a prompt, seconds per token of a chunk; None before the first.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._answered_at = time.perf_counter()
        self.token_s: float | None = None

    def answered(self) -> None:
        """Record that all running requests have just got their tokens."""
        self._answered_at = time.perf_counter()

    @property
    def waited_s(self) -> float:
        """For how long they have waited since, seconds."""
        return time.perf_counter() - self._answered_at

    def limit_s(self, decode_s: float, others: Others = NO_OTHERS) -> float:
        """The longest time between two tokens; at least half of it is a prompt's, however long a step takes.

        Between two tokens every engine has its turn, some of them also for a part of a prompt.

        Args:
            decode_s: seconds of a step that decodes a token of every running request.
            others: the work of the other engines of the process.
        """
        return max((_PLANNED * self._longest_gap_s - others.decode_s) / (1 + others.prompts), 2 * decode_s)


class ChunkPace:
    """Decides where a prompt's forward pauses, while other requests get their next tokens.

    A long prompt passes layer by layer in large chunks, which takes less time than many small parts that pass all
    layers. Between two chunks, and within one, the other requests are answered, so that none waits much longer than the
    target.

    Args:
        answers: of the other requests.
        tokens: of the prompt in this forward.

    Attributes:
        chunk_tokens: how many tokens the next chunks have.
        paused_s: how long the forward has paused, seconds.
    """

    def __init__(self, answers: AnswerPace, tokens: int) -> None:
        self._answers, self._tokens = answers, tokens
        self.chunk_tokens, self.paused_s = tokens, 0.0
        self._passing = tokens
        self._resumed_at = time.perf_counter()

    def pause(self, passing: int) -> None:
        """Record that the forward can pause here.

        passing: tokens of a chunk of the present layer, which began before the last plan.
        """
        now, answers = time.perf_counter(), self._answers
        self._passing = passing
        found = (now - self._resumed_at) / passing
        before = found if answers.token_s is None else answers.token_s
        answers.token_s = max(found, before + _FORGOTTEN * (found - before))
        self._resumed_at = now

    def resume(self) -> None:
        """Record that the forward goes on."""
        now = time.perf_counter()
        self.paused_s += now - self._resumed_at
        self._resumed_at = now

    def plan(self, rows: int, decode_s: float, others: Others = NO_OTHERS) -> None:
        """Plan the chunks of the next layers.

        Args:
            rows: how many requests of this engine wait for tokens.
            decode_s: seconds of a step that decodes one of each.
            others: the work of the other engines of the process.
        """
        self.chunk_tokens = self._tokens
        if rows or others.rows:
            decode_s = decode_s if rows else 0.0
            free_s = self._answers.limit_s(decode_s, others) - decode_s
            token_s = self._answers.token_s or 0.0
            while self.chunk_tokens > _LEAST and token_s * self.chunk_tokens * _PAUSES > free_s:
                self.chunk_tokens = max(_LEAST, self.chunk_tokens // 2)

    def are_due(self, decode_s: float, others: Others = NO_OTHERS) -> bool:
        """Whether other requests would wait too long if they got their next tokens one pause later.

        Arguments as for `plan`.
        """
        answers = self._answers
        return answers.waited_s + self._next_s + decode_s > answers.limit_s(decode_s, others)

    def turn_s(self, others: Others) -> float:
        """After how many seconds of the engine's turn other engines have theirs."""
        limit_s = self._answers.limit_s(0.0, others)
        return max(0.0, limit_s - self._next_s) if others.rows else limit_s

    @property
    def _next_s(self) -> float:
        """How long it takes to the next pause, seconds; 0 before the first one."""
        return (self._answers.token_s or 0.0) * self._passing
