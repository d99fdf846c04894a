"""The scheduler: which prompt is computed next, and which requests get a token, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hetero_kv.serving.admission import Admission
from hetero_kv.serving.answer_pace import AnswerPace, ChunkPace
from hetero_kv.serving.attended import Attended, Replay
from hetero_kv.serving.checkpoints import Checkpoints
from hetero_kv.serving.forward import ModelForward, Part
from hetero_kv.serving.output_processor import OutputProcessor
from hetero_kv.serving.part_size import LEAST, LEAST_BESIDE, SMALL, PartSize
from hetero_kv.serving.prompt_order import PromptOrder
from hetero_kv.serving.prompt_speed import PromptSpeed
from hetero_kv.serving.queues import Queues, free, with_caches
from hetero_kv.serving.request import Request
from hetero_kv.serving.row_decoder import RowDecoder, bursts, caches_and_tokens
from hetero_kv.serving.turns import EngineTurn

_logger = logging.getLogger(__name__)
# Within so many seconds, a client that leaves is noticed.
_NOTICED_S = 1.0


class CancelledInPrefillError(Exception):
    """Raised between two chunks of a prompt whose request is cancelled."""


class StepWithinError(Exception):
    """Raised between two chunks of a prompt when the step that was computed there failed with `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Scheduler:
    """Computes the answers to requests, step by step.

    A step admits requests, computes a part of a prompt, and decodes one token of every request whose prompt is
    computed, or several if guesses were right. Small parts, also of several prompts, are computed in one forward, with
    these tokens if there are any. A large part passes layer by layer, and pauses for steps of the others whenever these
    are due (`AnswerPace`). A request that fails, or is cancelled, does not affect the others.

    Args:
        forward: computes the model.
        queues: the requests.
        admission: decides which of them get memory.
        outputs: chooses tokens, and ends requests.
        checkpoints: takes checkpoints of prompts, at the end of parts.
        order: of the prompts.
        part_size: chooses how many tokens of a prompt a step computes.
        pace: decides when a large part pauses.
        speed: is told how fast prompts are computed.
        turn: this engine's turn, during which `step` is called.
        decoder: decodes the tokens of answers.
    """

    def __init__(
        self, forward: ModelForward, queues: Queues, admission: Admission, outputs: OutputProcessor,
        checkpoints: Checkpoints, order: PromptOrder, part_size: PartSize, speed: PromptSpeed, turn: EngineTurn,
        pace: AnswerPace, decoder: RowDecoder,
    ) -> None:  # fmt: skip
        self.forward, self.queues, self.admission = forward, queues, admission
        self._outputs, self._part_size = outputs, part_size
        self._order, self._prompt_speed, self._pace, self._decoder = order, speed, pace, decoder
        self._checkpoints, self._turn = checkpoints, turn
        self._has_warned = False
        #: Called in every step: moves new requests into the queues.
        self.receive: Callable[[], None] = lambda: None
        #: When a step began or ended, or a chunk of a prompt was done, seconds of `time.monotonic`.
        self.active_at = time.monotonic()

    def step(self) -> None:
        """Compute one step. After an interrupt (a BaseException), the next step continues where it came."""
        with self.forward.model.hetero_kv_injection.checked_once():
            self._step()

    def _step(self) -> None:
        rows = self._begin()
        passing = self._passing()
        if not (passing and self._splits() and self._mixed(passing, rows)):
            if passing and not self._prefill(passing[0]):
                self._report()
                return
            if passing:
                # Others have come and gone since.
                rows = [each for each in self.admission.rows() if each is not passing[0]]
            self._decoder.decode(rows)
        self._pace.answered()
        self._report()

    def _begin(self) -> list[Request]:
        """Begin a step: end and admit requests. Returns those to decode a token of."""
        self.active_at = time.monotonic()
        self._outputs.choose()
        self._admit()
        return self.admission.rows()

    def _admit(self) -> None:
        """Receive new requests, end cancelled ones, and admit others."""
        self.receive()
        for request in self.queues.all:
            # A prompt that is being computed notices it itself.
            if request.is_cancelled and request is not self.queues.computing:
                self._outputs.retire(request, "stopped")
        self.admission.admit()

    def _passing(self) -> list[Request]:
        """The prompts to compute, in their order; while a large one pauses, only short ones that come before it."""
        passing, paused = self._order.passing(), self.queues.computing
        if paused is None:
            return passing
        before = passing[: passing.index(paused)]
        small = [each for each in before if len(each.tokens) - each.stored <= self._small]
        # A look at the hooks of all modules takes a millisecond, and a forward may pause a thousand times.
        return small if small and self._splits() else []

    def _report(self) -> None:
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
        if not self.forward.splits_prompts or not self.forward.is_hooked:
            return self.forward.splits_prompts
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
            size = self._size_of(remaining, beside, self._small)
            if size < remaining and self._pauses:
                size = min(remaining, self._part_size.alone)
            checkpoint = None if isinstance(request, Replay) else self._checkpoints.next_stop(request, request.stored)
            size = size if checkpoint is None else min(size, checkpoint - request.stored)
        return request.stored + size

    def _size_of(self, remaining: int, beside: bool, small: int) -> int:
        """See `PartSize.of`."""
        rows, others, waited_s = len(self.queues.running), self._turn.others, self._pace.waited_s
        return self._part_size.of(remaining, rows, beside, others, small, waited_s)

    @property
    def _pauses(self) -> bool:
        """Whether others are answered between the chunks of the next forward of a prompt."""
        return self.queues.computing is None and self.forward.pauses

    def _mixed(self, passing: Sequence[Request], rows: Sequence[Request]) -> bool:
        """Compute small parts of prompts, and decode one token of every row if there are any, in one forward.

        Returns whether that was done; after an error, and for a large part, each is computed separately.
        """
        parts = self._parts_beside(passing) if self.forward.mixes else []
        if not parts or not (rows or self._are_brief(parts)):
            return False
        caches = [cache for _, cache in with_caches(request for request, _ in parts)]
        began = time.perf_counter()
        try:
            logits = self.forward.mixed(
                *caches_and_tokens(rows), [(cache, part) for cache, (_, part) in zip(caches, parts, strict=True)]
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
        self._outputs.accept([request for request, _ in given], bursts(row for _, row in given))
        return True

    def _are_brief(self, parts: Sequence[tuple[Request, Part]]) -> bool:
        """Whether small parts are computed in so little time that a cancelled request can wait for their end."""
        speed = self._part_size.tokens_per_s
        return speed is None or sum(len(part.tokens) for _, part in parts) / speed < _NOTICED_S

    @property
    def _small(self) -> int:
        """The most tokens of a small part; few while nobody waits for a token, and a cancelled request for its end."""
        return self.forward.most_beside if self.queues.running else SMALL

    def _parts_beside(self, passing: Sequence[Request]) -> list[tuple[Request, Part]]:
        """Small parts of prompts in progress, of as many as fit into a step; empty if the first one's is large."""
        parts: list[tuple[Request, Part]] = []
        most = self._small
        left = self._size_of(most, beside=True, small=most)
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

    def _prefill(self, request: Request) -> bool:
        """Pass a part of a prompt, or all of its rest; after the last part comes the first token.

        Returns whether the other requests get their next tokens now: always after the last part, and before that if
        they are due or could not be answered meanwhile.
        """
        cache, start, splits = request.cache, request.stored, self._splits()
        assert cache is not None
        if isinstance(request, Replay):
            stop = self._stop_of(request, request.passing, splits, beside=False)
            compute: Callable[[], Any] = partial(request.compute, self.forward, stop, splits=splits)
        else:
            part = self._part_of(request, splits, beside=False)
            stop, compute = part.stop, partial(self.forward.prefill, cache, part)
        began = time.perf_counter()
        request.advance(start)
        pace, pauses = ChunkPace(self._pace, stop - start), self._pauses
        # A prompt that is alone pauses between its chunks only: 3 % less time.
        pauses_within = pauses and splits and len(self.queues.all) > 1

        def pause() -> None:
            if request.is_cancelled:
                raise CancelledInPrefillError
            pace.pause(cache.passing_tokens)
            self.active_at = time.monotonic()
            self._turn.pass_on(pace.turn_s(self._turn.others))
            if pauses:
                self._answer_others(request, pace)
            if pauses and splits:
                pace.plan(len(self.queues.running), self._part_size.decode_s, self._turn.others)
                cache.chunk_tokens = pace.chunk_tokens
            pace.resume()
            self.active_at = time.monotonic()

        def report(layers_done: int, layers: int, tokens_done: int, tokens: int) -> None:
            # A finished layer counts all of its tokens already.
            share = (layers_done * tokens + (tokens_done if tokens_done < tokens else 0)) / (layers * tokens)
            request.advance(request.reuse.tokens + share * (request.prompt_end - request.reuse.tokens))
            pause()

        cache.on_progress = report
        try:
            with cache.requesting(pause=pause if pauses_within else None):
                computed = compute()
        except CancelledInPrefillError:
            self._outputs.retire(request, "stopped")
            return True
        except StepWithinError as failed:
            raise failed.error from None
        except Exception as error:
            self.queues.fail(request, error)
            return True
        finally:
            cache.on_progress = cache.chunk_tokens = None
        request.advance(stop)
        if isinstance(request, Replay):
            if computed is not None:
                self._end_replay(request, computed)
            return True
        seconds = time.perf_counter() - began - pace.paused_s
        self._prompt_speed.passed(request, stop - start, seconds, part.is_last)
        if stop - start >= LEAST or not self._checkpoints.are_taken:
            # Before a checkpoint parts are short, and each of their tokens takes longer than those to plan.
            self._part_size.passed(stop - start, seconds)
        self._checkpoints.take(request)
        if part.is_last:
            self.queues.answer(request)
            self._outputs.accept([request], bursts(computed[None]))
            return True
        return not pauses or pace.are_due(self._part_size.decode_s, self._turn.others)

    def _answer_others(self, request: Request, pace: ChunkPace) -> None:
        """Compute steps of the other requests between two chunks of a prompt, if they are due or come first.

        Raises StepWithinError when that fails.
        """
        self.queues.computing = request
        try:
            with self.forward.model.hetero_kv_injection.checked_once():
                self._admit()
                if self.queues.running and pace.are_due(self._part_size.decode_s, self._turn.others):
                    self._step()
                while self._passing():
                    self._step()
                    self._turn.pass_on(pace.turn_s(self._turn.others))
        except Exception as error:
            raise StepWithinError(error) from error
        finally:
            self.queues.computing = None

    def _end_replay(self, replay: Replay, attended: Attended) -> None:
        """End a replay; keep its sequence if others may want what it had to compute."""
        cache = self.queues.leave(replay)
        assert cache is not None
        replay.stream.complete(attended)
        if attended.cached_tokens + 1 < cache.get_seq_length():
            self._outputs.keep(cache, replay)
        else:
            free(cache)

    # -- ends

    def retire_all(self) -> None:
        """End all requests as they are."""
        for request in self.queues.all:
            self._outputs.retire(request, "stopped")

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error."""
        for request in self.queues.all:
            self.queues.fail(request, error)
