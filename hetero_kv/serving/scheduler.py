"""The scheduler: which prompt is computed next, and which requests get a token, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.serving.admission import Admission
from hetero_kv.serving.attended import Attended, Replay
from hetero_kv.serving.checkpoints import Checkpoints
from hetero_kv.serving.forward import ModelForward, Part
from hetero_kv.serving.output_processor import OutputProcessor
from hetero_kv.serving.part_size import LEAST, LEAST_BESIDE, SMALL, PartSize
from hetero_kv.serving.prompt_order import PromptOrder
from hetero_kv.serving.prompt_speed import PromptSpeed
from hetero_kv.serving.queues import Queues, free, with_caches
from hetero_kv.serving.request import Request
from hetero_kv.serving.speculation.burst import Burst
from hetero_kv.serving.speculation.speculation import Speculation, without_guesses
from hetero_kv.serving.turns import EngineTurn

_logger = logging.getLogger(__name__)
# Within so many seconds, a client that leaves is noticed.
_NOTICED_S = 1.0


class CancelledInPrefillError(Exception):
    """Raised between two chunks of a prompt whose request is cancelled."""


class Scheduler:
    """Computes the answers to requests, step by step.

    A step admits requests, computes a part of a prompt, and decodes one token of every request whose prompt is
    computed, or several if guesses were right. Small parts, also of several prompts, are computed in one forward, with
    these tokens if there are any. A request that fails, or is cancelled, does not affect the others.

    Args:
        forward: computes the model.
        queues: the requests.
        admission: decides which of them get memory.
        outputs: chooses tokens, and ends requests.
        checkpoints: takes checkpoints of prompts, at the end of parts.
        order: of the prompts.
        part_size: chooses how many tokens of a prompt a step computes.
        speed: is told how fast prompts are computed.
        turn: this engine's turn, during which `step` is called.
        speculation: guesses tokens.
        splits_prompts: whether prompts are computed in parts; otherwise each is computed whole.
    """

    def __init__(
        self, forward: ModelForward, queues: Queues, admission: Admission, outputs: OutputProcessor,
        checkpoints: Checkpoints, order: PromptOrder, part_size: PartSize, speed: PromptSpeed, turn: EngineTurn,
        speculation: Speculation, *, splits_prompts: bool,
    ) -> None:  # fmt: skip
        self.forward, self.queues, self.admission = forward, queues, admission
        self._outputs, self._part_size, self._splits_prompts = outputs, part_size, splits_prompts
        self._order, self._prompt_speed = order, speed
        self._checkpoints, self._turn, self._speculation = checkpoints, turn, speculation
        self._has_warned = False
        #: When a step began or ended, or a chunk of a prompt was done, seconds of `time.monotonic`.
        self.active_at = time.monotonic()

    def step(self) -> None:
        """Compute one step. After an interrupt (a BaseException), the next step continues where it came."""
        with self.forward.model.hetero_kv_injection.checked_once():
            self._step()

    def _step(self) -> None:
        self.active_at = time.monotonic()
        self._outputs.choose()
        for request in self.queues.all:
            if request.is_cancelled:
                self._outputs.retire(request, "stopped")
        self.admission.admit()
        rows = self.admission.rows()
        passing = self._order.passing()
        splits = bool(passing) and self._splits()
        if not (splits and self._mixed(passing, rows)):
            if passing:
                self._prefill(passing[0], splits)
            self._decode(rows)
        self.active_at = time.monotonic()
        self.report_load()

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Tokens of new prompts computed per second; None before the first ones."""
        return self._prompt_speed.tokens_per_s

    def report_load(self) -> None:
        """Report this engine's work to the other engines."""
        self._turn.rows, self._turn.decode_s = len(self.queues.running), self._part_size.decode_s
        self._turn.passes_prompt = bool(self.queues.prefilling)

    # -- computing

    def _splits(self) -> bool:
        """Whether prompts are computed in parts; not under foreign hooks, which may depend on all tokens."""
        if not self._splits_prompts or not self.forward.is_hooked:
            return self._splits_prompts
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("prompts are computed whole, and delay other requests, because the model has foreign hooks")
        return False

    def _part_of(self, request: Request, splits: bool, beside: bool) -> Part:
        """The next part of a request's prompt; all of its rest unless `splits`."""
        stop = self._stop_of(request, len(request.tokens), splits, beside)
        return Part(request.tokens, request.stored, stop, request.reuse.tokens, request.question_tokens)

    def _stop_of(self, request: Request, end: int, splits: bool, beside: bool) -> int:
        """The end of the next part of a request's tokens up to `end`."""
        size = remaining = end - request.stored
        if splits:
            size = self._part_size.of(remaining, len(self.queues.running), beside, self._turn.others, self._small)
            checkpoint = None if isinstance(request, Replay) else self._checkpoints.next_stop(request, request.stored)
            size = size if checkpoint is None else min(size, checkpoint - request.stored)
        return request.stored + size

    def _mixed(self, passing: Sequence[Request], rows: Sequence[Request]) -> bool:
        """Compute small parts of prompts, and decode one token of every row if there are any, in one forward.

        Returns whether that was done; after an error, and for a large part, each is computed separately.
        """
        parts = self._parts_beside(passing) if self.forward.mixes and (rows or self._is_brief()) else []
        if not parts:
            return False
        caches = [cache for _, cache in with_caches(request for request, _ in parts)]
        began = time.perf_counter()
        try:
            logits = self.forward.mixed(
                *self._caches_and_tokens(rows), [(cache, part) for cache, (_, part) in zip(caches, parts, strict=True)]
            )
        except Exception as error:
            _logger.warning(
                "parts of %d prompts failed beside %d requests (%s); each is computed alone",
                len(parts), len(rows), error,
            )  # fmt: skip
            return False
        tokens, seconds = len(rows) + sum(len(part.tokens) for _, part in parts), time.perf_counter() - began
        if rows or tokens >= LEAST or not self._checkpoints.are_taken:
            self._part_size.passed(tokens, seconds, beside=bool(rows))
        given = list(zip(rows, logits, strict=False))
        for (request, part), row in zip(parts, logits[len(rows) :], strict=True):
            self._prompt_speed.passed(request, tokens, seconds, part.is_last)
            request.advance(part.stop)
            self._checkpoints.take(request)
            if part.is_last:
                self.queues.answer(request)
                given.append((request, row))
        self._outputs.accept([request for request, _ in given], _bursts(row for _, row in given))
        return True

    def _is_brief(self) -> bool:
        """Whether a small part is computed in so little time that a cancelled request can wait for its end."""
        speed = self._part_size.tokens_per_s
        return speed is None or SMALL / speed < _NOTICED_S

    @property
    def _small(self) -> int:
        """The most tokens of a small part; few while nobody waits for a token, and a cancelled request for its end."""
        return self.forward.most_beside if self.queues.running else SMALL

    def _parts_beside(self, passing: Sequence[Request]) -> list[tuple[Request, Part]]:
        """Small parts of prompts in progress, of as many as fit into a step; empty if the first one's is large."""
        parts: list[tuple[Request, Part]] = []
        most = self._small
        left = self._part_size.of(most, len(self.queues.running), beside=True, others=self._turn.others, small=most)
        for request in passing:
            if isinstance(request, Replay):
                break
            part = self._part_of(request, splits=True, beside=True)
            if not parts and len(part.tokens) > most:
                break
            if len(part.tokens) > left:
                part = replace(part, stop=part.start + left)
            parts.append((request, part))
            left -= len(part.tokens)
            if not part.is_last or left < LEAST_BESIDE:
                break
        return parts

    def _prefill(self, request: Request, splits: bool) -> None:
        """Pass a part of the prompt, or all of it unless it `splits`; after the last one comes the first token."""
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
            self._outputs.retire(request, "stopped")
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
            self._outputs.accept([request], _bursts(computed[None]))

    def _end_replay(self, replay: Replay, attended: Attended) -> None:
        """End a replay; keep its sequence if others may want what it had to compute."""
        cache = self.queues.leave(replay)
        assert cache is not None
        replay.stream.complete(attended)
        if attended.cached_tokens + 1 < cache.get_seq_length():
            self._outputs.keep(cache, replay)
        else:
            free(cache)

    def _decode(self, rows: Sequence[Request]) -> None:
        """Decode one token of every row, or several where guesses are right."""
        if not rows:
            return
        drafts = self._drafts(rows)
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
        self._outputs.accept(rows, _bursts(logits))
        self._speculation.costs.took(len(rows), time.perf_counter() - began)

    def _drafts(self, rows: Sequence[Request]) -> list[list[int]]:
        """The guesses of the rows. After an error these answers are computed without."""
        try:
            return self._speculation.drafts(
                [request.drafter for request in rows],
                self._caches_and_tokens(rows)[0],
                [request.tokens_left for request in rows],
            )
        except Exception as error:
            for request in rows:
                request.drafter = without_guesses(error, request.__dict__.get("drafter"))
            return []

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
        self._outputs.accept(rows, [Burst(*each) for each in zip(logits, drafts, stored, strict=True)])
        # Dropping wrong guesses is part of their cost.
        self._speculation.costs.took(sum(map(len, passing)), time.perf_counter() - began)
        return True

    def _decode_alone(self, rows: Sequence[Request]) -> None:
        """Decode row by row, so that only the row that cannot be computed fails."""
        for request in rows:
            try:
                logits = self._decoded([request])
            except Exception as error:
                self.queues.fail(request, error)
            else:
                self._outputs.accept([request], _bursts(logits))

    def _decoded(self, rows: Sequence[Request]) -> Sequence[torch.Tensor | Likeliest]:
        caches, tokens = self._caches_and_tokens(rows)
        if len(rows) == 1 and self.forward.may_choose and rows[0].sampler.takes_likeliest:
            return self.forward.likeliest(caches[0], tokens[0])
        return list(self.forward.decode(caches, tokens))

    @staticmethod
    def _caches_and_tokens(rows: Sequence[Request]) -> tuple[list[HeteroCache], list[int]]:
        """The rows' caches, and their next tokens."""
        return [cache for _, cache in with_caches(rows)], [request.tokens[-1] for request in rows]

    # -- ends

    def retire_all(self) -> None:
        """End all requests as they are."""
        for request in self.queues.all:
            self._outputs.retire(request, "stopped")

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error."""
        for request in self.queues.all:
            self.queues.fail(request, error)


def _bursts(rows: Iterable[torch.Tensor | Likeliest]) -> list[Burst]:
    """A token of every row, by its logits [vocab], or the likeliest one."""
    return [Burst([row]) for row in rows]
