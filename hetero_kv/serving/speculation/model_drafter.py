"""A draft model's guesses for one sequence, and which of its tokens the draft model's cache has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.checkpoint import Checkpoint
from hetero_kv.errors import brief_error
from hetero_kv.serving.speculation.acceptance import Acceptance

if TYPE_CHECKING:
    from hetero_kv.serving.speculation.draft_model import DraftModel

_logger = logging.getLogger(__name__)
# Assumed of a draft model's guesses before any is verified.
_FIRST_ODDS = 0.7


class ModelDrafter:
    """Guesses the next tokens of one sequence by a draft model.

    Its cache is created with the first guess. Guesses stay in it until the next draft, which drops the wrong ones.

    Args:
        model: the draft model, which computes several drafters in one forward.
        tokens: the prompt's.
        tenant: the owner of the sequence.

    Attributes:
        tokens: the sequence's known tokens.
        cache: the draft model's keys and values; None before the first guess and after `release`.
        is_over: whether it has stopped guessing because the draft model failed for this sequence.
    """

    def __init__(self, model: DraftModel, tokens: Sequence[int], tenant: str = "") -> None:
        self._model, self.tokens, self.tenant = model, list(tokens), tenant
        self.cache: HeteroCache | None = None
        self.is_over = False
        self._acceptance = Acceptance(_FIRST_ODDS)
        # The cache has the first `_verified` of `tokens`, followed by tokens of `_behind` up to its length.
        self._verified = 0
        self._behind: list[int] = []
        # A checkpoint of layers that lose earlier tokens, from before the guesses.
        self._point: Checkpoint | None = None

    @property
    def guess_s(self) -> float:
        """See `Drafter`; this sequence's share of a joint guess."""
        return self._model.guess_s

    def add(self, token: int) -> None:
        """See `Drafter`."""
        self.tokens.append(token)
        self._acceptance.add(token)

    def odds(self, most: int) -> list[float]:
        """See `Drafter`."""
        return [] if self.is_over else self._acceptance.odds(most)

    def guesses(self, count: int) -> list[int]:
        """See `Drafter`; none while the draft model prefills the sequence."""
        return self._model.guesses([self], [count], [float("inf")])[0]

    def release(self) -> None:
        """See `Drafter`."""
        self._model.release(self)

    # -- for the draft model

    @property
    def stored(self) -> list[int]:
        """The ids of the tokens in its cache, including guesses."""
        return [] if self.cache is None else [*self.tokens[: self._verified], *self._stored_behind]

    @property
    def _stored_behind(self) -> list[int]:
        assert self.cache is not None
        return self._behind[: max(0, self.cache.get_seq_length() - self._verified)]

    @property
    def missing(self) -> list[int]:
        """The sequence's tokens that are not in its cache; valid after `go_back`."""
        return self.tokens[0 if self.cache is None else self.cache.get_seq_length() :]

    def begin(self, cache: HeteroCache) -> None:
        """Use this cache, which has a prefix of the tokens."""
        self.cache, self._point = cache, None
        self._verified, self._behind = cache.get_seq_length(), []

    def passing(self, tokens: Sequence[int]) -> None:
        """Record tokens that the draft model is about to compute; the computation may fail."""
        self._behind = [*self._stored_behind, *tokens]

    def has_caught_up(self) -> None:
        """Record that its cache has the whole sequence, so that guesses can follow."""
        assert self.cache is not None
        self.begin(self.cache)
        self._point = self.cache.checkpoint()

    def guessed(self, guesses: Sequence[int]) -> None:
        """Record the guesses at the next tokens."""
        self._acceptance.guessed(guesses)

    def go_back(self) -> None:
        """Drop wrong guesses and the sequence's last token from its cache; its forward gives the next guess."""
        cache = self.cache
        if cache is None:
            return
        tokens, stored, common = self.tokens, cache.get_seq_length(), min(self._verified, len(self.tokens) - 1)
        for token in self._stored_behind:
            if common == len(tokens) - 1 or tokens[common] != token:
                break
            common += 1
        if common < stored:
            point = self._point
            if cache.groups[0].can_crop_to(common):
                cache.crop(common - stored)
            elif point is not None and point.length <= common:
                cache.crop(point.length - stored, point)
            else:
                cache.reset()
        self.begin(cache)

    def end(self, error: Exception) -> None:
        """Stop guessing, because the draft model has failed for this sequence."""
        self.is_over = True
        _logger.warning("the draft model %s guesses no more of this answer (%s)", self._model.name, brief_error(error))
        self.release()
