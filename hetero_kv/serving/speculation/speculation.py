"""Speculation: guesses at the next tokens are verified in one forward, and several tokens come for the price of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import brief_error
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.speculation.draft_length import MOST_GUESSES, StepCosts, draft_lengths
from hetero_kv.serving.speculation.draft_model import DraftModel
from hetero_kv.serving.speculation.drafter import Drafter
from hetero_kv.serving.speculation.lookup_drafter import LookupDrafter
from hetero_kv.serving.speculation.model_drafter import ModelDrafter
from hetero_kv.serving.speculation.sparse_draft import SparseDraft, SparseDrafter
from hetero_kv.serving.speculation.ways import WAYS, require_way

_logger = logging.getLogger(__name__)
# The share of an answer's time that guesses of a draft model may save: 1.5 times the speed.
_SAVED = 1 / 3


class Speculation:
    """Makes the drafters of a model's sequences, and says how many tokens each drafts in a step.

    Args:
        forward: verifies the drafts.
        way: a `Way`, or the name of the draft model, for sequences that do not say.
        draft: the draft model; None without one.

    Attributes:
        way, draft: as passed.
        sparse: guesses by the model itself.
        costs: what steps take.

    Raises ConfigError for another way.
    """

    def __init__(self, forward: ModelForward, way: str = "auto", draft: DraftModel | None = None) -> None:
        self._forward, self.draft, self.sparse = forward, draft, SparseDraft(forward)
        self.way = self.require(way)
        self.costs = StepCosts()
        self._told: set[str] = set()
        self.in_effect()

    def require(self, way: str) -> str:
        """A way that a sequence may say. Raises ConfigError for another one, which may be a model to load."""
        return require_way(way, self._named)

    @property
    def ways(self) -> dict[str, str | None]:
        """The ways that a sequence may say, each with the reason why nothing is guessed so; None where it is."""
        return {way: self._why_not(way) for way in self._named}

    @property
    def _named(self) -> tuple[str, ...]:
        return WAYS if self.draft is None else (*WAYS, self.draft.name)

    def in_effect(self, way: str | None = None) -> str:
        """What a sequence gets that says `way`; None for one that says nothing. Logs once why it is `off`."""
        way = self.way if way is None else self.require(way)
        reason = self._why_not(way)
        if reason is None:
            return "lookup" if way == "auto" else way
        if way not in self._told:
            self._told.add(way)
            tell_off(reason, is_chosen=way != "auto")
        return "off"

    def _why_not(self, way: str) -> str | None:
        if way == "off":
            return None
        return self._forward.why_no_sparse_drafts if way == "sparse" else self._forward.why_no_drafts

    def drafter(self, tokens: Sequence[int], way: str | None = None, tenant: str = "") -> Drafter | None:
        """The drafter of a tenant's sequence that has these tokens; None where speculation is off."""
        way = self.in_effect(way)
        if way == "off":
            return None
        if self.draft is not None and way == self.draft.name:
            return self.draft.drafter(tokens, tenant)
        return self.sparse.drafter(tokens) if way == "sparse" else LookupDrafter(tokens)

    def drafts(
        self, drafters: Sequence[Drafter | None], caches: Sequence[HeteroCache], left: Sequence[int],
        has_room: Callable[[Sequence[int]], bool] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """The guesses of several sequences that the next step verifies, as many as their caches have room for.

        Args:
            left: of each sequence, the most tokens that its answer still takes.
            has_room: whether others leave the sequences' store room for so many guesses of each; None if it has no
                others.
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
        while has_room is not None and any(lengths) and not has_room(lengths):
            lengths = [length // 2 for length in lengths]
        counts = [_fitting(cache, length) if length else 0 for cache, length in zip(caches, lengths, strict=True)]
        return self._guesses(drafters, caches, counts, left)

    def _guesses(
        self, drafters: Sequence[Drafter | None], caches: Sequence[HeteroCache], counts: Sequence[int],
        left: Sequence[int],
    ) -> list[list[int]]:  # fmt: skip
        """At most so many guesses of each sequence; those of one model together."""
        found: list[list[int]] = [[] for _ in drafters]
        by_model: list[tuple[int, ModelDrafter]] = []
        sparse: list[tuple[int, SparseDrafter]] = []
        for index, (drafter, count) in enumerate(zip(drafters, counts, strict=True)):
            if not count:
                continue
            if isinstance(drafter, ModelDrafter):
                by_model.append((index, drafter))
            elif isinstance(drafter, SparseDrafter):
                if not drafter.is_over and caches[index].get_seq_length() == drafter.length - 1:
                    sparse.append((index, drafter))
            elif isinstance(drafter, LookupDrafter):
                found[index] = drafter.guesses(count)
        if by_model and self.draft is not None:
            step_s = self.costs.of(len(drafters))
            indices = [index for index, _ in by_model]
            guesses = self.draft.guesses(
                [drafter for _, drafter in by_model],
                [counts[index] for index in indices],
                [_SAVED * left[index] * step_s for index in indices],
            )
            for index, each in zip(indices, guesses, strict=True):
                found[index] = each
        if sparse:
            indices = [index for index, _ in sparse]
            guesses = self.sparse.guesses(
                [drafter for _, drafter in sparse],
                [caches[index] for index in indices],
                [counts[index] for index in indices],
            )
            for index, each in zip(indices, guesses, strict=True):
                found[index] = each
        return found

    @property
    def dram_bytes(self) -> int:
        """DRAM of the draft model's blocks that were ever used, and of mean keys, bytes."""
        return self.sparse.dram_bytes + (0 if self.draft is None else self.draft.dram_bytes)

    def close(self) -> None:
        """Free what the draft model keeps of ended sequences."""
        if self.draft is not None:
            self.draft.close()


def tell_off(reason: str, *, is_chosen: bool) -> None:
    """Say in the log why speculation is off; as a warning where somebody has chosen a way."""
    _logger.log(logging.WARNING if is_chosen else logging.INFO, "speculation is off: %s", reason)


def without_guesses(error: Exception, drafter: Drafter | None) -> Drafter | None:
    """The drafter of a sequence from now on, whose guesses could not be verified; its tokens are computed without.

    It guesses on where only the room for guesses was missing.
    """
    if isinstance(error, CacheFullError):
        return drafter
    _logger.warning("guesses were not verified (%s); this answer is computed without", brief_error(error))
    if drafter is not None:
        drafter.release()
    return None


def _fitting(cache: HeteroCache, count: int) -> int:
    """How many of `count` guesses the cache has room for."""
    # One place is the newest token's.
    try:
        cache.require_room(1, count + 1)
    except CacheFullError:
        return max(0, (cache.room or 0) - 1)
    return count
