"""The scheduler: which prompt passes next, and which requests get a token, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.store import Store
from hetero_kv.errors import brief_error
from hetero_kv.serving.admission import Admission, free, with_caches
from hetero_kv.serving.forward import ModelForward, Part
from hetero_kv.serving.memory import Memory
from hetero_kv.serving.part_size import SMALL, PartSize
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.request import Request
from hetero_kv.serving.stream import FinishReason
from hetero_kv.serving.swapped import SwapFolder

_logger = logging.getLogger(__name__)


class CancelledInPrefillError(Exception):
    """Raised between two chunks of a prompt whose request is cancelled."""


class Scheduler(Admission):
    """Computes the answers to requests, step by step.

    A step admits a request, passes a part of its prompt, and decodes one token of every request that has its prompt
    behind it; a small part in one forward with these tokens. A request that fails, or is cancelled, leaves alone.

    Args:
        forward: computes.
        store: the blocks of all requests.
        prefixes: the sequences of ended requests.
        swaps: where sequences of preempted requests go.
        part_size: how many tokens of a prompt pass in a step.
        max_batch: the most requests that are answered at a time.
        splits_prompts: whether prompts pass in parts; otherwise each passes whole.
    """

    def __init__(
        self, forward: ModelForward, store: Store, prefixes: ResidentPrefixes, swaps: SwapFolder, part_size: PartSize,
        *, max_batch: int, splits_prompts: bool,
    ) -> None:  # fmt: skip
        self._forward, self._store, self._prefixes, self._part_size = forward, store, prefixes, part_size
        super().__init__(Memory(store, prefixes, swaps), swaps)
        self._max_batch, self._splits_prompts = max_batch, splits_prompts
        # Requests whose last forward is over and whose next token is not chosen, with its logits [vocab].
        self._unchosen: list[tuple[Request, torch.Tensor]] = []

    def step(self) -> None:
        """Compute one step. After Ctrl-C in a forward, or while tokens are chosen, the next one goes on there."""
        self._choose()
        self._retire_cancelled()
        self._admit()
        rows = self._rows()
        if not self._mixed(rows):
            self._prefill()
            self._decode(rows)

    # -- admission

    def _retire_cancelled(self) -> None:
        for request in self.requests:
            if request.is_cancelled:
                self._retire(request, "stopped")

    def _admit(self) -> None:
        """Admit the first request that waits, if there is a row and memory for it."""
        if self.prefilling is not None or not self.waiting or len(self.running) == self._max_batch:
            return
        request = self.waiting[0]
        if request is self._blocked:
            return
        cache = None
        try:
            cache, cached = self._begun_cache(request)
            if not self._make_room(request, cache):
                free(cache)
                self._blocked = request
                return
            if request.swapped is not None:
                request.swapped.restore(cache)
        except Exception as error:
            if cache is not None:
                free(cache)
            self._fail(request, error)
            return
        self.waiting.remove(request)
        request.cache = cache
        if request.swapped is None:
            request.cached_tokens, self.prefilling = cached, request
        else:
            request.drop_swapped()
            self.running.append(request)

    def _begun_cache(self, request: Request) -> tuple[HeteroCache, int]:
        """A cache with the longest stored beginning of a prompt, and that beginning's number of tokens."""
        if request.swapped is not None:
            return self._forward.new_cache(self._store), 0
        prompt = request.tokens
        live = [(each.cache, each.tokens[: each.stored]) for each in self.running if each.cache is not None]
        prefix = self._prefixes.fork(prompt, live)
        resident = (self._forward.new_cache(self._store), 0) if prefix is None else prefix
        return self._loaded_cache(request, *resident) or resident

    def _loaded_cache(self, request: Request, resident: HeteroCache, cached: int) -> tuple[HeteroCache, int] | None:
        """A cache with a beginning from the disk, where that is longer by a block than the resident one, and fits."""
        stored = self._prefixes.stored
        found = None if stored is None else stored.longest(request.tokens, cached + stored.least)
        if stored is None or found is None:
            return None
        context, tokens = found
        empty = self._forward.new_cache(self._store)
        _, needed = self._memory.entering(request, empty)
        others = [self._memory.entering(*each) for each in with_caches(self.running)]
        if not self._memory.fits([(empty, max(needed, context.tokens)), *others]):
            return None
        loaded = stored.load(context, tokens, resident.tokenizer)
        if loaded is None:
            return None
        free(resident)
        return loaded, tokens

    # -- computing

    def _part_of(self, request: Request, beside: bool) -> Part:
        """The next part of a request's prompt."""
        prompt, start = request.tokens, request.stored
        size = remaining = len(prompt) - start
        if self._splits_prompts:
            size = self._part_size.of(remaining, len(self.running), beside)
        return Part(prompt, start, start + size, request.cached_tokens, request.question)

    def _mixed(self, rows: Sequence[Request]) -> bool:
        """Pass a small part of the prompt and decode one token of every row, in one forward.

        Returns whether that was done; after an error, and for a large part, each is computed by itself.
        """
        request, rows = self.prefilling, list(rows)
        if request is None or not rows or not self._splits_prompts or not self._forward.mixes:
            return False
        part = self._part_of(request, beside=True)
        if len(part.tokens) > SMALL:
            return False
        assert request.cache is not None
        began = time.perf_counter()
        try:
            logits = self._forward.mixed(*self._caches_and_tokens(rows), request.cache, part)
        except Exception as error:
            _logger.warning(
                "a part of a prompt failed beside %d requests (%s); each is computed alone", len(rows), error
            )
            return False
        self._part_size.passed(len(rows) + len(part.tokens), time.perf_counter() - began)
        if part.is_last:
            self.prefilling = None
            self.running.append(request)
            rows.append(request)
        self._take(rows, logits[: len(rows)])
        return True

    def _prefill(self) -> None:
        """Pass a part of the prompt; behind the last one comes the first token."""
        request = self.prefilling
        if request is None:
            return
        cache, part = request.cache, self._part_of(request, beside=False)
        assert cache is not None
        began = time.perf_counter()

        def check(*_: int) -> None:
            if request.is_cancelled:
                raise CancelledInPrefillError

        cache.on_progress = check
        try:
            logits = self._forward.prefill(cache, part)
        except CancelledInPrefillError:
            self._retire(request, "stopped")
            return
        except Exception as error:
            self._fail(request, error)
            return
        finally:
            cache.on_progress = None
        self._part_size.passed(len(part.tokens), time.perf_counter() - began)
        if part.is_last:
            self.prefilling = None
            self.running.append(request)
            self._take([request], logits[None])

    def _decode(self, rows: Sequence[Request]) -> None:
        """Decode one token of every row."""
        if not rows:
            return
        began = time.perf_counter()
        try:
            logits = self._decoded(rows)
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows[0], error)
                return
            _logger.warning("a step of %d requests failed (%s); each is computed alone", len(rows), error)
            self._decode_alone(rows)
            return
        self._part_size.decoded(time.perf_counter() - began)
        self._take(rows, logits)

    def _decode_alone(self, rows: Sequence[Request]) -> None:
        """Decode row by row, so that the one that cannot be computed fails alone."""
        for request in rows:
            try:
                logits = self._decoded([request])
            except Exception as error:
                self._fail(request, error)
            else:
                self._take([request], logits)

    def _decoded(self, rows: Sequence[Request]) -> torch.Tensor:
        return self._forward.decode(*self._caches_and_tokens(rows))

    @staticmethod
    def _caches_and_tokens(rows: Sequence[Request]) -> tuple[list[HeteroCache], list[int]]:
        """The rows' caches, and the tokens that follow in them."""
        return [cache for _, cache in with_caches(rows)], [request.tokens[-1] for request in rows]

    def _take(self, rows: Sequence[Request], logits: torch.Tensor) -> None:
        """Choose the rows' tokens by logits [rows, vocab], and pass them on."""
        self._unchosen = list(zip(rows, logits, strict=True))
        self._choose()

    def _choose(self) -> None:
        """Choose the tokens of which the logits are there."""
        while self._unchosen:
            request, logits = self._unchosen[0]
            try:
                choice = request.sampler.choose(logits)
                del self._unchosen[0]
                reason = request.take(choice)
            except Exception as error:
                # A mask is code of others; its error is that of its request.
                self._fail(request, error)
                continue
            if reason is not None:
                self._retire(request, reason)

    # -- ends

    def _retire(self, request: Request, reason: FinishReason) -> None:
        """End a request whose answer is complete, and keep its sequence for others."""
        cache = self._leave(request)
        request.complete(reason)
        if cache is None:
            return
        try:
            self._prefixes.keep(cache, request.tokens[: cache.get_seq_length()])
        except Exception as error:
            _logger.warning("the sequence of an ended request is not kept (%s)", brief_error(error))

    def retire_all(self) -> None:
        """End all requests as they are."""
        for request in self.requests:
            self._retire(request, "stopped")

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error."""
        for request in self.requests:
            self._fail(request, error)

    def _leave(self, request: Request) -> HeteroCache | None:
        self._unchosen = [each for each in self._unchosen if each[0] is not request]
        return super()._leave(request)
