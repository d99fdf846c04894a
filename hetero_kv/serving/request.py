"""One request of the engine: its prompt, its answer so far, and its cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.serving.growing_answer import GrowingAnswer
from hetero_kv.serving.reuse import Reuse
from hetero_kv.serving.sampler import Choice, Sampler
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.speculation.drafter import DraftCounts, Drafter
from hetero_kv.serving.status import RequestStatus, SequenceStatus, State
from hetero_kv.serving.stream import Completion, FinishReason, Progress, ResultStream
from hetero_kv.serving.swapped import Swapped

if TYPE_CHECKING:
    from hetero_kv.serving.checkpoints import KeptCheckpoint


class Request:
    """A prompt and its answer so far. Only the engine's thread touches it; readers have its stream.

    Attributes:
        tokens: ids of the prompt, then of the answer.
        prompt_tokens: the prompt's number of tokens.
        question: how many of its last tokens are the question about the others; None if unknown.
        limit: the longest answer that fits, tokens.
        cache: its keys and values; None while it waits.
        swapped: its sequence on the disk, once it is preempted; None otherwise.
        reuses: whether it may reuse a prefix that was computed before.
        tenant: its owner; it reuses prefixes only from requests of the same tenant.
        reuse: how much of the prompt was computed before.
        is_store_away: whether the address of stored contexts did not answer in time.
        checkpoints: the states that its layers can return to, if they do not keep every token.
        drafter: guesses its tokens; None without speculation. Created with the first token.
        counts: numbers of drafted and accepted tokens.
        began: when it arrived, seconds of `time.perf_counter`.
    """

    def __init__(
        self, prompt: Sequence[int], params: SamplingParams, sampler: Sampler, answer: GrowingAnswer,
        stream: ResultStream[Any], *, question: int | None = None, priority: int = 0, reuses: bool = True,
        tenant: str = "", new_drafter: Callable[[], Drafter | None] = lambda: None, answered: Sequence[int] = (),
    ) -> None:  # fmt: skip
        # As for a preempted request, the tokens that its answer has already are computed with the prompt.
        self.tokens = [*prompt, *answered]
        self.prompt_tokens = len(prompt)
        self.params, self.sampler, self.stream = params, sampler, stream
        self.limit, self.question, self.priority, self.reuses = answer.limit, question, priority, reuses
        self.tenant = tenant
        self.cache: HeteroCache | None = None
        self.swapped: Swapped | None = None
        self.reuse = Reuse()
        self.checkpoints: list[KeptCheckpoint] = []
        self._new_drafter, self.counts = new_drafter, DraftCounts()
        self.is_store_away = False
        self._answer = answer
        self.began = time.perf_counter()

    _admitted: float | None = None
    _first_token_s: float | None = None

    @cached_property
    def drafter(self) -> Drafter | None:
        """See the class. It reads the whole prompt, for which the caller of `generate` does not wait."""
        return self._new_drafter()

    def release_drafter(self) -> None:
        """Give back the memory of its guesses; those that follow take it again."""
        # It is not made for that.
        drafter: Drafter | None = self.__dict__.get("drafter")
        if drafter is not None:
            drafter.release()

    @property
    def is_cancelled(self) -> bool:
        """Whether it ends before its next token. Any thread may cancel its stream, in any state of the request."""
        return self.stream.is_cancelled

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were computed before."""
        return min(self.prompt_tokens, self.reuse.tokens)

    @property
    def question_tokens(self) -> int | None:
        """How many of its last tokens are the question, with the answer's tokens that are known; None if unknown."""
        return None if self.question is None else self.question + len(self.tokens) - self.prompt_tokens

    def reusable(self, common: int, choosing_queries: Callable[[int, int | None], int]) -> int:
        """How many of `common` first tokens can be reused: the others' queries choose what the answer attends to.

        choosing_queries: as `AttentionOperator.choosing_queries`.
        """
        return max(0, min(common, len(self.tokens) - choosing_queries(len(self.tokens), self.question_tokens)))

    def begin(self, reuse: Reuse, checkpoints: Sequence[KeptCheckpoint]) -> None:
        """Start its prefill after the reused prefix, with these checkpoints."""
        self.reuse = self.stream.reuse = reuse
        self.checkpoints = list(checkpoints)

    def begin_again(self) -> None:
        """Queue its whole prompt again."""
        self.reuse, self.stream.reuse, self.checkpoints = Reuse(), None, []

    @property
    def stored(self) -> int:
        """How many of its tokens are in its cache, or on the disk."""
        # The engine's thread may remove either while another thread reads this.
        swapped, cache = self.swapped, self.cache
        if swapped is not None:
            return swapped.tokens
        return 0 if cache is None else cache.get_seq_length()

    @property
    def prompt_end(self) -> int:
        """How many of its first tokens are computed as a prompt."""
        return len(self.tokens)

    @property
    def tokens_left(self) -> int:
        """How many more tokens its answer may have."""
        return self.prompt_tokens + self.limit - len(self.tokens)

    @property
    def max_stored_tokens(self) -> int:
        """The largest number of tokens that its cache will store: the last token of an answer is not stored."""
        return self.prompt_tokens + self.limit - 1

    def drop_swapped(self) -> None:
        """Remove its sequence from the disk, if it has one there."""
        if self.swapped is not None:
            self.swapped.remove()
            self.swapped = None

    def advance(self, processed: float) -> None:
        """Report to readers how many tokens of the prompt are computed."""
        if self._admitted is None:
            self._admitted = time.perf_counter()
        self.stream.progress = Progress(
            self.prompt_tokens, self.cached_tokens, min(self.prompt_tokens, round(processed)),
            time.perf_counter() - self._admitted,
        )  # fmt: skip

    def sequence(self, state: State, can_roll_back: bool) -> SequenceStatus:
        """Its prompt, for later prompts with the same prefix; the request is in `state`.

        can_roll_back: whether all layers can roll back to any token.
        """
        ends = [self.prompt_tokens - (self.question or 0), self.prompt_tokens]
        return SequenceStatus(
            self, self.tokens[: self.prompt_tokens], state, max(0, self.prompt_tokens - self.stored),
            None if can_roll_back else [*(each.length for each in list(self.checkpoints)), *ends], self.tenant,
        )  # fmt: skip

    def status(self, state: State) -> RequestStatus:
        """The request, which is in `state`."""
        progress = self.stream.progress
        processed = 0 if progress is None else progress.processed_tokens
        return RequestStatus(state, self.prompt_tokens, processed, len(self._answer.pieces))

    def take(self, choice: Choice) -> FinishReason | None:
        """Append a token to the answer. Returns why the answer ends with it; None if it goes on."""
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self.began
        self.tokens.append(choice.token)
        if self.drafter is not None:
            self.drafter.add(choice.token)
        reason = self._answer.take(choice)
        self.stream.put(self._answer.pieces[-1])
        return reason

    def complete(self, reason: FinishReason) -> None:
        """Give the whole answer to the readers."""
        reason = self._answer.complete(reason)
        self.stream.complete(
            Completion(
                text=self._answer.text,
                pieces=tuple(self._answer.pieces),
                finish_reason=reason,
                stop_text=self._answer.stop_text,
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.cached_tokens,
                first_token_s=self._first_token_s,
                total_s=time.perf_counter() - self.began,
                reuse=self.reuse,
                drafted_tokens=self.counts.drafted,
                accepted_tokens=self.counts.accepted,
            )
        )
