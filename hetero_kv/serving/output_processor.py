"""Chooses the tokens of answers by a forward's logits, and ends requests whose answers are complete."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.errors import brief_error
from hetero_kv.serving.checkpoints import KeptCheckpoint
from hetero_kv.serving.prefixes import ResidentPrefixes
from hetero_kv.serving.queues import Queues
from hetero_kv.serving.request import Request
from hetero_kv.serving.speculation.burst import Burst
from hetero_kv.serving.stream import FinishReason

_logger = logging.getLogger(__name__)


class OutputProcessor:
    """Gives requests their tokens, and keeps the sequences of those that end.

    Args:
        queues: the requests.
        prefixes: keeps the sequences of ended requests.
    """

    def __init__(self, queues: Queues, prefixes: ResidentPrefixes) -> None:
        self._queues, self._prefixes = queues, prefixes
        # Requests whose last forward is over and whose next token is not chosen.
        self._unchosen: list[tuple[Request, Burst]] = []

    def accept(self, rows: Sequence[Request], bursts: Sequence[Burst]) -> None:
        """Choose the tokens of these requests, each by the logits of its burst, and stream them."""
        self._unchosen = list(zip(rows, bursts, strict=True))
        self.choose()

    def choose(self) -> None:
        """Choose the tokens whose logits are computed; after an interrupt, those that it left."""
        while self._unchosen:
            request, burst = self._unchosen[0]
            if request not in self._queues.running:
                # The request ended while its forward was computed.
                del self._unchosen[0]
                continue
            try:
                choice = burst.choose(request.sampler)
                if burst.is_over:
                    self._end(request, burst)
                reason = request.take(choice)
            except Exception as error:
                # A mask is code of others; its error is that of its request.
                self._queues.fail(request, error)
                continue
            if reason is not None:
                self.retire(request, reason)

    def _end(self, request: Request, burst: Burst) -> None:
        """Count a burst that is over, which drops its wrong guesses."""
        burst.end()
        self._unchosen.remove((request, burst))
        request.counts.add(burst.drafted, burst.accepted)

    def retire(self, request: Request, reason: FinishReason) -> None:
        """End a request whose answer is complete, and keep its sequence for later prompts; an error fails it alone."""
        try:
            for owner, burst in list(self._unchosen):
                if owner is request:
                    self._end(request, burst)
        except Exception as error:
            self._queues.fail(request, error)
            return
        cache = self._queues.leave(request)
        try:
            request.complete(reason)
        except Exception as error:
            # The end of a text is decoded by code of others.
            request.stream.fail(error)
        if cache is not None:
            self.keep(cache, request, request.checkpoints)

    def keep(self, cache: HeteroCache, request: Request, checkpoints: Sequence[KeptCheckpoint] = ()) -> None:
        """Keep the cache of an ended request for later prompts; a failure is logged."""
        try:
            self._prefixes.keep(cache, request.tokens[: cache.get_seq_length()], checkpoints, request.tenant)
        except Exception as error:
            _logger.warning("the sequence of an ended request is not kept (%s)", brief_error(error))
