"""The scheduler: which prompt passes next, and which requests get a token, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.errors import brief_error
from hetero_kv.serving.admission import Admission
from hetero_kv.serving.attended import Attended, Replay
from hetero_kv.serving.checkpoints import Checkpoints, KeptCheckpoint
from hetero_kv.serving.forward import ModelForward, Part
from hetero_kv.serving.part_size import LEAST, SMALL, PartSize
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.prompt_speed import PromptSpeed
from hetero_kv.serving.queues import Queues, free, with_caches
from hetero_kv.serving.request import Request
from hetero_kv.serving.speculation.burst import Burst
from hetero_kv.serving.speculation.speculation import Speculation, without_guesses
from hetero_kv.serving.stream import FinishReason
from hetero_kv.serving.turns import Turn

_logger = logging.getLogger(__name__)


class CancelledInPrefillError(Exception):
    """Raised between two chunks of a prompt whose request is cancelled."""


class Scheduler:
    """Computes the answers to requests, step by step.

    A step admits a request, passes a part of its prompt, and decodes one token of every request that has its prompt
    behind it, or several where guesses were right; a small part in one forward with these tokens. A request that fails,
    or is cancelled, leaves alone.

    Args:
        forward: computes.
        queues: the requests.
        admission: says which of them have memory.
        prefixes: keeps the sequences of ended requests.
        checkpoints: takes those of prompts, whose parts end there.
        part_size: how many tokens of a prompt pass in a step.
        turn: the engine's turn, which `step` has.
        speculation: guesses tokens.
        splits_prompts: whether prompts pass in parts; otherwise each passes whole.
    """

    def __init__(
        self, forward: ModelForward, queues: Queues, admission: Admission, prefixes: ResidentPrefixes,
        checkpoints: Checkpoints, part_size: PartSize, turn: Turn, speculation: Speculation, *, splits_prompts: bool,
    ) -> None:  # fmt: skip
        self.forward, self.queues, self.admission = forward, queues, admission
        self._prefixes, self._part_size, self._splits_prompts = prefixes, part_size, splits_prompts
        self._prompt_speed = PromptSpeed()
        self._checkpoints, self._turn, self._speculation = checkpoints, turn, speculation
        # Requests whose last forward is over and whose next token is not chosen.
        self._unchosen: list[tuple[Request, Burst]] = []
        self._has_warned = False
        #: When a step began or ended, or a chunk of a prompt passed, seconds of `time.monotonic`.
        self.active_at = time.monotonic()

    def step(self) -> None:
        """Compute one step. After an error that is no Exception, the next one goes on where it came."""
        self.active_at = time.monotonic()
        self._choose()
        for request in self.queues.all:
            if request.is_cancelled:
                self._retire(request, "stopped")
        self.admission.admit()
        rows = self.admission.rows()
        splits = self.queues.prefilling is not None and self._splits()
        if not (splits and self._mixed(rows)):
            self._prefill(splits)
            self._decode(rows)
        self.active_at = time.monotonic()
        self.tell()

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Tokens of prompts that pass in a second; None before the first ones."""
        return self._prompt_speed.tokens_per_s

    def tell(self) -> None:
        """Tell the other engines what waits for a token here."""
        self._turn.rows, self._turn.decode_s = len(self.queues.running), self._part_size.decode_s
        self._turn.passes_prompt = self.queues.prefilling is not None

    # -- computing

    def _splits(self) -> bool:
        """Whether prompts pass in parts. Under others' hooks, which may look across tokens, they pass whole."""
        if not self._splits_prompts or not self.forward.is_hooked:
            return self._splits_prompts
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("prompts pass whole, and hold up other requests, because the model has hooks of others")
        return False

    def _part_of(self, request: Request, splits: bool, beside: bool) -> Part:
        """The next part of a request's prompt; all that is left of it unless it `splits`."""
        stop = self._stop_of(request, len(request.tokens), splits, beside)
        question = request.question
        if question is not None:
            # Behind it pass the tokens that the answer has already.
            question += len(request.tokens) - request.prompt_tokens
        return Part(request.tokens, request.stored, stop, request.reuse.tokens, question)

    def _stop_of(self, request: Request, end: int, splits: bool, beside: bool) -> int:
        """The end of the next part of a request's tokens up to `end`."""
        size = remaining = end - request.stored
        if splits:
            size = self._part_size.of(remaining, len(self.queues.running), beside, self._turn.others)
            checkpoint = None if isinstance(request, Replay) else self._checkpoints.next_stop(request, request.stored)
            size = size if checkpoint is None else min(size, checkpoint - request.stored)
        return request.stored + size

    def _mixed(self, rows: Sequence[Request]) -> bool:
        """Pass a small part of the prompt and decode one token of every row, in one forward.

        Returns whether that was done; after an error, and for a large part, each is computed by itself.
        """
        request, rows = self.queues.prefilling, list(rows)
        if request is None or isinstance(request, Replay) or not rows or not self.forward.mixes:
            return False
        part = self._part_of(request, splits=True, beside=True)
        if len(part.tokens) > SMALL:
            return False
        assert request.cache is not None
        began = time.perf_counter()
        try:
            logits = self.forward.mixed(*self._caches_and_tokens(rows), request.cache, part)
        except Exception as error:
            _logger.warning(
                "a part of a prompt failed beside %d requests (%s); each is computed alone", len(rows), error
            )
            return False
        tokens, seconds = len(rows) + len(part.tokens), time.perf_counter() - began
        self._part_size.passed(tokens, seconds)
        self._prompt_speed.passed(request, tokens, seconds, part.is_last)
        request.advance(part.stop)
        self._checkpoints.take(request)
        if part.is_last:
            self.queues.answer(request)
            rows.append(request)
        self._take(rows, _bursts(logits[: len(rows)]))
        return True

    def _prefill(self, splits: bool) -> None:
        """Pass a part of the prompt, or all of it unless it `splits`; behind the last one comes the first token."""
        request = self.queues.prefilling
        if request is None:
            return
        cache, start = request.cache, request.stored
        assert cache is not None
        if isinstance(request, Replay):
            stop = self._stop_of(request, request.passing, splits, beside=False)
            compute: Callable[[], Any] = partial(request.compute, self.forward, stop, splits=splits)
        else:
            part = self._part_of(request, splits, beside=False)
            stop, compute = part.stop, partial(self.forward.prefill, cache, part)
        began = time.perf_counter()
        request.advance(start)

        def check(layers_done: int, layers: int, tokens_done: int, tokens: int) -> None:
            if request.is_cancelled:
                raise CancelledInPrefillError
            # A finished layer counts all of its tokens already.
            beyond = tokens_done if tokens_done < tokens else 0
            request.advance(start + (stop - start) * (layers_done * tokens + beyond) / (layers * tokens))
            self.active_at = time.monotonic()
            self._turn.pass_on()
            self.active_at = time.monotonic()

        cache.on_progress = check
        try:
            computed = compute()
        except CancelledInPrefillError:
            self._retire(request, "stopped")
            return
        except Exception as error:
            self.queues.fail(request, error)
            return
        finally:
            cache.on_progress = None
        request.advance(stop)
        if isinstance(request, Replay):
            if computed is not None:
                self._end_replay(request, computed)
            return
        seconds = time.perf_counter() - began
        self._prompt_speed.passed(request, stop - start, seconds, part.is_last)
        if stop - start >= LEAST or not self._checkpoints.are_taken:
            # Before a checkpoint parts are short, and each of their tokens takes longer than those to plan.
            self._part_size.passed(stop - start, seconds)
        self._checkpoints.take(request)
        if part.is_last:
            self.queues.answer(request)
            self._take([request], _bursts(computed[None]))

    def _end_replay(self, replay: Replay, attended: Attended) -> None:
        """End a replay; keep its sequence if others may want what it had to compute."""
        cache = self.queues.leave(replay)
        assert cache is not None
        replay.stream.complete(attended)
        if attended.cached_tokens + 1 < cache.get_seq_length():
            self._keep(cache, replay)
        else:
            free(cache)

    def _decode(self, rows: Sequence[Request]) -> None:
        """Decode one token of every row, or several where guesses are right."""
        if not rows:
            return
        drafts = self._speculation.drafts(
            [request.drafter for request in rows], self._caches_and_tokens(rows)[0], [request.left for request in rows]
        )
        if any(drafts) and self._verified(rows, drafts):
            return
        began = time.perf_counter()
        try:
            logits = self._decoded(rows)
        except Exception as error:
            if len(rows) == 1:
                self.queues.fail(rows[0], error)
                return
            _logger.warning("a step of %d requests failed (%s); each is computed alone", len(rows), error)
            self._decode_alone(rows)
            return
        self._part_size.decoded(time.perf_counter() - began)
        self._take(rows, _bursts(logits))
        self._speculation.costs.took(len(rows), time.perf_counter() - began)

    def _verified(self, rows: Sequence[Request], drafts: Sequence[Sequence[int]]) -> bool:
        """Verify the rows' guesses; returns whether that was done. After an error they are decoded without."""
        caches, tokens = self._caches_and_tokens(rows)
        began = time.perf_counter()
        try:
            passing = [[token, *draft] for token, draft in zip(tokens, drafts, strict=True)]
            logits, stored = self.forward.verify(caches, passing)
        except Exception as error:
            for request, draft in zip(rows, drafts, strict=True):
                if draft:
                    request.drafter = without_guesses(error, request.drafter)
            return False
        self._part_size.decoded(time.perf_counter() - began)
        self._take(rows, [Burst(*each) for each in zip(logits, drafts, stored, strict=True)])
        # What it takes to drop wrong guesses is part of their cost.
        self._speculation.costs.took(sum(map(len, passing)), time.perf_counter() - began)
        return True

    def _decode_alone(self, rows: Sequence[Request]) -> None:
        """Decode row by row, so that the one that cannot be computed fails alone."""
        for request in rows:
            try:
                logits = self._decoded([request])
            except Exception as error:
                self.queues.fail(request, error)
            else:
                self._take([request], _bursts(logits))

    def _decoded(self, rows: Sequence[Request]) -> Sequence[torch.Tensor | Likeliest]:
        caches, tokens = self._caches_and_tokens(rows)
        if len(rows) == 1 and self.forward.may_choose and rows[0].sampler.takes_likeliest:
            return self.forward.likeliest(caches[0], tokens[0])
        return list(self.forward.decode(caches, tokens))

    @staticmethod
    def _caches_and_tokens(rows: Sequence[Request]) -> tuple[list[HeteroCache], list[int]]:
        """The rows' caches, and the tokens that follow in them."""
        return [cache for _, cache in with_caches(rows)], [request.tokens[-1] for request in rows]

    def _take(self, rows: Sequence[Request], bursts: Sequence[Burst]) -> None:
        """Choose the rows' tokens, and pass them on."""
        self._unchosen = list(zip(rows, bursts, strict=True))
        self._choose()

    def _choose(self) -> None:
        """Choose the tokens of which the logits are there."""
        while self._unchosen:
            request, burst = self._unchosen[0]
            if request not in self.queues.running:
                # It has left meanwhile.
                del self._unchosen[0]
                continue
            try:
                choice = burst.choose(request.sampler)
                if burst.is_over:
                    self._end(request, burst)
                reason = request.take(choice)
            except Exception as error:
                # A mask is code of others; its error is that of its request.
                self.queues.fail(request, error)
                continue
            if reason is not None:
                self._retire(request, reason)

    def _end(self, request: Request, burst: Burst) -> None:
        """Count a burst that is over, which drops its wrong guesses."""
        burst.end()
        self._unchosen.remove((request, burst))
        request.counts.add(burst.drafted, burst.accepted)

    # -- ends

    def _retire(self, request: Request, reason: FinishReason) -> None:
        """End a request whose answer is complete, and keep its sequence for others."""
        for owner, burst in list(self._unchosen):
            if owner is request:
                self._end(request, burst)
        cache = self.queues.leave(request)
        request.complete(reason)
        if cache is not None:
            self._keep(cache, request, request.checkpoints)

    def _keep(self, cache: HeteroCache, request: Request, checkpoints: Sequence[KeptCheckpoint] = ()) -> None:
        try:
            self._prefixes.keep(cache, request.tokens[: cache.get_seq_length()], checkpoints, request.tenant)
        except Exception as error:
            _logger.warning("the sequence of an ended request is not kept (%s)", brief_error(error))

    def retire_all(self) -> None:
        """End all requests as they are."""
        for request in self.queues.all:
            self._retire(request, "stopped")

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error."""
        for request in self.queues.all:
            self.queues.fail(request, error)


def _bursts(rows: Iterable[torch.Tensor | Likeliest]) -> list[Burst]:
    """A token of every row, by its logits [vocab], or the likeliest one."""
    return [Burst([row]) for row in rows]
