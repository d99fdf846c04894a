"""The scheduler: which prompt passes next, and which requests get a token, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.forward import ModelForward, Part
from hetero_kv.serving.part_size import SMALL, PartSize
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.request import Request
from hetero_kv.serving.stream import FinishReason

_logger = logging.getLogger(__name__)


class CancelledInPrefillError(Exception):
    """Raised between two chunks of a prompt whose request is cancelled."""


class Scheduler:
    """Requests that wait, the one whose prompt passes, and those that are being answered.

    A step admits a request, passes a part of its prompt, and decodes one token of every request that has its prompt
    behind it; a small part in one forward with these tokens. A request that fails, or is cancelled, leaves alone.

    Args:
        forward: computes.
        store: the blocks of all requests.
        prefixes: the sequences of ended requests.
        part_size: how many tokens of a prompt pass in a step.
        max_batch: the most requests that are answered at a time.
        splits_prompts: whether prompts pass in parts; otherwise each passes whole.

    Attributes:
        waiting: by priority, then in the order in which they came.
        prefilling: None while no prompt passes.
        running: the rows of the next step of decoding.
    """

    def __init__(
        self, forward: ModelForward, store: Store, prefixes: ResidentPrefixes, part_size: PartSize, *, max_batch: int,
        splits_prompts: bool,
    ) -> None:  # fmt: skip
        self._forward, self._store, self._prefixes, self._part_size = forward, store, prefixes, part_size
        self._max_batch, self._splits_prompts = max_batch, splits_prompts
        self.waiting: list[Request] = []
        self.prefilling: Request | None = None
        self.running: list[Request] = []
        # The request for which there is no memory until another one ends.
        self._blocked: Request | None = None
        # Requests whose last forward is over and whose next token is not chosen, with its logits [vocab].
        self._unchosen: list[tuple[Request, torch.Tensor]] = []

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return [*self.running, *([] if self.prefilling is None else [self.prefilling]), *self.waiting]

    def add(self, request: Request) -> None:
        """Queue a request behind all others of its priority or a more urgent one; 0 is more urgent than 1."""
        self.waiting.append(request)
        self.waiting.sort(key=lambda each: each.priority)

    def step(self) -> None:
        """Compute one step. After Ctrl-C in a forward, or while tokens are chosen, the next one goes on there."""
        self._choose()
        self._retire_cancelled()
        self._admit()
        if not self._mixed():
            self._prefill()
            self._decode()

    # -- admission

    def _retire_cancelled(self) -> None:
        for request in self.requests:
            if request.is_cancelled:
                self._retire(request, "stopped")

    def _admit(self) -> None:
        """Admit the first request that waits, if there is a row and memory for all of its tokens."""
        if self.prefilling is not None or not self.waiting or len(self.running) == self._max_batch:
            return
        request = self.waiting[0]
        if request is self._blocked:
            return
        try:
            cache, cached = self._begun_cache(request)
            if not self._make_room(request, cache, cached):
                cache.reset()
                self._blocked = request
                return
        except Exception as error:
            self._fail(request, error)
            return
        self.waiting.remove(request)
        request.cache, request.cached_tokens = cache, cached
        self.prefilling = request

    def _begun_cache(self, request: Request) -> tuple[HeteroCache, int]:
        """A cache with the longest stored beginning of a prompt, and that beginning's number of tokens."""
        prompt = request.tokens
        live = [(each.cache, each.tokens[: each.stored]) for each in self.running if each.cache is not None]
        prefix = self._prefixes.fork(prompt, live)
        if prefix is not None:
            return prefix
        return self._forward.new_cache(self._store), 0

    def _make_room(self, request: Request, cache: HeteroCache, cached: int) -> bool:
        """Free sequences of ended requests until all tokens of the request have blocks; returns whether they have.

        Raises HeteroKVError if they never will.
        """
        while (missing := self._missing_blocks(request, cache, cached)) > 0:
            if self._prefixes.drop_oldest():
                continue
            if not self.running:
                raise HeteroKVError(
                    f"the request needs {request.most_stored} tokens, and the store has {self._store.tokens}, which "
                    f"are {missing} blocks too few; shorten the prompt or max_new_tokens, or give the engine more "
                    "tokens (kv_tokens)"
                )
            return False
        return True

    def _missing_blocks(self, request: Request, cache: HeteroCache, cached: int) -> int:
        """How many blocks too few are free for the request, and for what the running requests have yet to store."""
        missing = 0
        for layout in cache.groups[0].layouts:
            size = layout.block_size
            # A partly filled block of the beginning is copied.
            needed = -(-request.most_stored // size) - cached // size
            for other in self.running:
                assert other.cache is not None
                (sequence,) = other.cache.sequences
                table = sequence.tables[layout]
                needed += -(-other.most_stored // size) - table.num_blocks
                if table.length % size and table.allocator.references(int(table.ids[-1])) > 1:
                    needed += 1
            missing = max(missing, needed - self._store.free_blocks(layout))
        return missing

    # -- computing

    def _part_of(self, request: Request, beside: bool) -> Part:
        """The next part of a request's prompt."""
        prompt, start = request.tokens, request.stored
        size = remaining = len(prompt) - start
        if self._splits_prompts:
            size = self._part_size.of(remaining, len(self.running), beside)
        return Part(prompt, start, start + size, request.cached_tokens, request.question)

    def _mixed(self) -> bool:
        """Pass a small part of the prompt and decode one token of every running request, in one forward.

        Returns whether that was done; after an error, and for a large part, each is computed by itself.
        """
        request, rows = self.prefilling, list(self.running)
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

    def _decode(self) -> None:
        """Decode one token of every running request."""
        rows = list(self.running)
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
        caches = [request.cache for request in rows if request.cache is not None]
        return caches, [request.tokens[-1] for request in rows]

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
        if cache is not None:
            self._prefixes.keep(cache, request.tokens[: cache.get_seq_length()])
        request.complete(reason)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request with an error, and free its blocks."""
        cache = self._leave(request)
        if cache is not None:
            cache.reset()
        request.stream.fail(error)

    def retire_all(self) -> None:
        """End all requests as they are."""
        for request in self.requests:
            self._retire(request, "stopped")

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error."""
        for request in self.requests:
            self._fail(request, error)

    def _leave(self, request: Request) -> HeteroCache | None:
        self._blocked = None
        self._unchosen = [each for each in self._unchosen if each[0] is not request]
        if self.prefilling is request:
            self.prefilling = None
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        cache, request.cache = request.cache, None
        return cache
