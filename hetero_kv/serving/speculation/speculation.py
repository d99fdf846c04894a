"""Speculation: guesses at the next tokens are verified in one forward, and several tokens come for the price of one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import brief_error
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.speculation.draft_length import MOST_GUESSES, StepCosts, draft_lengths
from hetero_kv.serving.speculation.drafter import Drafter
from hetero_kv.serving.speculation.lookup_drafter import LookupDrafter
from hetero_kv.serving.speculation.ways import require_way

_logger = logging.getLogger(__name__)


class Speculation:
    """Makes the drafters of a model's sequences, and says how many tokens each drafts in a step.

    Args:
        forward: verifies the drafts.
        way: a `Way`, for sequences that do not say.

    Attributes:
        way: as passed.
        costs: what steps take.

    Raises ConfigError for another way.
    """

    def __init__(self, forward: ModelForward, way: str = "auto") -> None:
        self._forward, self.way = forward, require_way(way)
        self.costs = StepCosts()
        self._told: set[str] = set()
        self.in_effect()

    def in_effect(self, way: str | None = None) -> str:
        """What a sequence gets that says `way`; None for one that says nothing. Logs once why it is `off`."""
        way = self.way if way is None else require_way(way)
        reason = None if way == "off" else self._forward.why_no_drafts
        if reason is None:
            return "lookup" if way == "auto" else way
        if way not in self._told:
            self._told.add(way)
            level = logging.INFO if way == "auto" else logging.WARNING
            _logger.log(level, "speculation is off: %s", reason)
        return "off"

    def drafter(self, tokens: Sequence[int], way: str | None = None) -> Drafter | None:
        """The drafter of a sequence that has these tokens; None where speculation is off."""
        return None if self.in_effect(way) == "off" else LookupDrafter(tokens)

    def drafts(
        self, drafters: Sequence[Drafter | None], caches: Sequence[HeteroCache], left: Sequence[int]
    ) -> list[list[int]]:
        """The guesses of several sequences that the next step verifies, as many as their caches have room for.

        Args:
            left: of each sequence, the most tokens that its answer still takes.
        """
        most = [min(MOST_GUESSES, tokens - 1) for tokens in left]
        odds = [
            [] if drafter is None or each < 1 else drafter.odds(each)
            for drafter, each in zip(drafters, most, strict=True)
        ]
        lengths = draft_lengths(self.costs, odds, [0.0 if each is None else each.guess_s for each in drafters])
        # Somebody may have put hooks into the model meanwhile.
        if not any(lengths) or self._forward.why_no_drafts is not None:
            return [[] for _ in drafters]
        return [
            _guesses(drafter, cache, length) if drafter is not None and length else []
            for drafter, cache, length in zip(drafters, caches, lengths, strict=True)
        ]


def without_guesses(error: Exception, drafter: Drafter | None) -> Drafter | None:
    """The drafter of a sequence from now on, whose guesses could not be verified; its tokens are computed without.

    It guesses on where only the room for guesses was missing.
    """
    if isinstance(error, CacheFullError):
        return drafter
    _logger.warning("guesses were not verified (%s); this answer is computed without", brief_error(error))
    return None


def _guesses(drafter: Drafter, cache: HeteroCache, count: int) -> list[int]:
    # One place is the newest token's.
    try:
        cache.require_room(1, count + 1)
    except CacheFullError:
        count = max(0, (cache.room or 0) - 1)
    return drafter.guesses(count)
