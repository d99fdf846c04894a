"""Decodes the next tokens of requests whose prompts are computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.likeliest import Likeliest
from hetero_kv.serving.admission import Admission
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.output_processor import OutputProcessor
from hetero_kv.serving.part_size import PartSize
from hetero_kv.serving.queues import Queues, with_caches
from hetero_kv.serving.request import Request
from hetero_kv.serving.speculation.burst import Burst
from hetero_kv.serving.speculation.speculation import Speculation, without_guesses

_logger = logging.getLogger(__name__)


class RowDecoder:
    """Decodes one token of every row, or several where guesses are right.

    Args:
        forward: computes the model.
        queues: the requests.
        outputs: chooses tokens, and ends requests.
        part_size: is told how long a step takes.
        speculation: guesses tokens.
        admission: says whether guesses have room.
    """

    def __init__(
        self, forward: ModelForward, queues: Queues, outputs: OutputProcessor, part_size: PartSize,
        speculation: Speculation, admission: Admission,
    ) -> None:  # fmt: skip
        self._forward, self._queues, self._outputs, self._admission = forward, queues, outputs, admission
        self._part_size, self._speculation = part_size, speculation

    def decode(self, rows: Sequence[Request]) -> None:
        """Decode the next token of each row, at least; a row that cannot be computed fails alone."""
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
                self._queues.fail(rows[0], error)
                return
            _logger.warning("a step of %d requests failed (%s); each is computed alone", len(rows), error)
            self._decode_alone(rows)
            return
        self._part_size.decoded(time.perf_counter() - began)
        self._outputs.accept(rows, bursts(logits))
        self._speculation.costs.took(len(rows), time.perf_counter() - began)

    def _drafts(self, rows: Sequence[Request]) -> list[list[int]]:
        """The guesses of the rows. After an error these answers are computed without."""
        try:
            return self._speculation.drafts(
                [request.drafter for request in rows],
                caches_and_tokens(rows)[0],
                [request.tokens_left for request in rows],
                partial(self._admission.has_room, rows),
            )
        except Exception as error:
            for request in rows:
                request.drafter = without_guesses(error, request.__dict__.get("drafter"))
            return []

    def _verified(self, rows: Sequence[Request], drafts: Sequence[Sequence[int]]) -> bool:
        """Verify the rows' guesses; returns whether that was done. After an error they are decoded without."""
        caches, tokens = caches_and_tokens(rows)
        began = time.perf_counter()
        try:
            passing = [[token, *draft] for token, draft in zip(tokens, drafts, strict=True)]
            logits, stored = self._forward.verify(caches, passing)
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
                self._queues.fail(request, error)
            else:
                self._outputs.accept([request], bursts(logits))

    def _decoded(self, rows: Sequence[Request]) -> Sequence[torch.Tensor | Likeliest]:
        caches, tokens = caches_and_tokens(rows)
        if self._forward.may_choose and all(each.sampler.takes_likeliest for each in rows):
            return self._forward.likeliest(caches, tokens)
        return list(self._forward.decode(caches, tokens))


def caches_and_tokens(rows: Sequence[Request]) -> tuple[list[HeteroCache], list[int]]:
    """The rows' caches, and their next tokens."""
    return [cache for _, cache in with_caches(rows)], [request.tokens[-1] for request in rows]


def bursts(rows: Iterable[torch.Tensor | Likeliest]) -> list[Burst]:
    """A token of every row, by its logits [vocab], or the likeliest one."""
    return [Burst([row]) for row in rows]
