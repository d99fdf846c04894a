"""Checkpoints of sequences whose layers do not keep every token, bounded in bytes."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable, Sequence

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.checkpoint import Checkpoint
from hetero_kv.engine.reservations import reserved_by_others
from hetero_kv.errors import brief_error
from hetero_kv.planning.free_memory import free_dram
from hetero_kv.serving.request import Request

_logger = logging.getLogger(__name__)
#: The largest distance between checkpoints of a prompt, tokens: a later prompt that diverges recomputes at most these.
EVERY = 1024
#: Tokens of a prompt after its second-to-last checkpoint. They cover the tokens of the chat template that begin an
#: answer (`<think>`, an empty thought), where a later turn diverges.
TAIL = 16
# Shorter prompts get no part for their tail: it would take as long as computing the prompt again.
_LEAST = 4 * TAIL


class KeptCheckpoint:
    """A checkpoint of a request or kept sequence, until it is dropped for newer ones."""

    def __init__(self, point: Checkpoint, used: int) -> None:
        self.point: Checkpoint | None = point
        self.length, self.used = point.length, used

    @property
    def nbytes(self) -> int:
        """Its memory."""
        return 0 if self.point is None else self.point.nbytes


class Checkpoints:
    """Takes checkpoints during prefill, and drops the least recently used ones beyond a limit.

    Args:
        limit: bytes of all checkpoints together. They take less where less memory is free besides what caches have
            reserved, or within the caches' budget (`dram_budget_gb`).
        empty: a cache of the model without tokens. If no layer of it needs checkpoints, none are taken.
    """

    def __init__(self, limit: int, empty: HeteroCache) -> None:
        self._limit = limit
        self.are_taken = limit > 0 and not empty.is_croppable
        self._kept: weakref.WeakSet[KeptCheckpoint] = weakref.WeakSet()
        # Bytes of the last checkpoint; those of windows grow until the windows are full.
        self._size = 0
        self._clock = itertools.count()

    @property
    def nbytes(self) -> int:
        """The memory of all checkpoints."""
        return sum(each.nbytes for each in self._kept)

    def next_stop(self, request: Request, start: int) -> int | None:
        """Where a part of a prompt that begins at `start` must end for a checkpoint, tokens; None: anywhere."""
        if not self.are_taken:
            return None
        tokens = request.prompt_tokens
        stops = [] if request.question is None else [tokens - request.question]
        if request.reuse.reason == "cannot_go_back":
            # Where two prompts diverge, a third one may too: after a common system prompt. Marconi calls these
            # positions "branching points" (arXiv:2411.19379, section 4.1).
            stops.append(request.reuse.common)
        if tokens - request.cached_tokens >= _LEAST:
            stops.append(tokens - TAIL)
        return min((stop for stop in stops if stop > start), default=None)

    def take(self, request: Request) -> None:
        """Take a checkpoint of a request if its prefill has reached a position that needs one."""
        cache = request.cache
        if not self.are_taken or cache is None:
            return
        length = cache.get_seq_length()
        last = max((each.length for each in request.checkpoints), default=0)
        is_stop = self.next_stop(request, length - 1) == length or length == request.prompt_tokens
        if length == last or not (is_stop or length - last >= EVERY):
            return
        limit = self._room()
        if self._size > limit:
            return
        try:
            point = cache.checkpoint()
        except (MemoryError, RuntimeError) as error:
            _logger.warning("no checkpoint is taken (%s)", brief_error(error))
            return
        if point is None:
            self.are_taken = False
            return
        if point.nbytes > self._limit:
            _logger.warning(
                "a checkpoint takes %s bytes, and checkpoint_gb allows %s; later prompts that depart from an earlier "
                "one share nothing with it",
                f"{point.nbytes:,}",
                f"{self._limit:,}",
            )
            self.are_taken = False
            return
        kept = KeptCheckpoint(point, next(self._clock))
        self._kept.add(kept)
        self._size = point.nbytes
        request.checkpoints.append(kept)
        self._shrink(limit)

    def _room(self) -> int:
        """Bytes that checkpoints may take now: the limit, or what the caches and their budget leave free."""
        reserved, taken = reserved_by_others(None), self.nbytes
        free = free_dram() - reserved.size
        if reserved.budget is not None:
            free = min(free, reserved.budget - reserved.planned - taken)
        return min(self._limit, taken + max(0, free))

    def _shrink(self, limit: int) -> None:
        total = self.nbytes
        for each in sorted(self._kept, key=lambda kept: kept.used):
            if total <= limit:
                return
            total -= each.nbytes
            each.point = None

    def use(self, checkpoints: Iterable[KeptCheckpoint]) -> None:
        """Record that a prompt continues a sequence with these checkpoints."""
        for each in checkpoints:
            each.used = next(self._clock)


def newest_within(checkpoints: Sequence[KeptCheckpoint], tokens: int) -> Checkpoint | None:
    """The longest checkpoint of at most `tokens` tokens; None if there is none."""
    points = [each.point for each in checkpoints if each.point is not None and each.length <= tokens]
    return max(points, key=lambda point: point.length, default=None)
