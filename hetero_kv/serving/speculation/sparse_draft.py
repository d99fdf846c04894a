"""Guesses of the model itself, by attention to few blocks of the same keys and values.

Self-speculation with sparse attention (TriForce, Sun et al. 2024, arXiv:2404.11912; MagicDec, Chen et al. 2024,
arXiv:2408.11049). It pays where reading keys and values takes much longer than reading the weights.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.errors import brief_error
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.speculation.acceptance import Acceptance
from hetero_kv.serving.speculation.draft_length import StepCosts

_logger = logging.getLogger(__name__)
# Assumed before any guess is verified; with lower odds none would be tried. Behind 31,000 tokens two thirds of the
# default model's guesses are right, and in some answers nearly all.
_FIRST_ODDS = 0.93
# For so many tokens of an answer the chosen blocks stay, if all guesses are right: choosing takes half a guess's time.
_CHOSEN_FOR = 64
# So many tokens of an answer come without guesses: computing the mean keys takes several tokens' time, which an answer
# of a few words does not win back.
_FIRST_WITHOUT = 8


class SparseDrafter:
    """Guesses the next tokens of one sequence by attention to few blocks.

    Args:
        draft: computes the guesses of several drafters in one forward.
        tokens: the sequence's.

    Attributes:
        newest: the sequence's last token, which its cache lacks when guesses are computed.
        length: tokens of the sequence.
        few: the blocks that guesses attend to.
        is_over: whether it has stopped guessing because a forward failed.
    """

    def __init__(self, draft: SparseDraft, tokens: Sequence[int]) -> None:
        self._draft, self._acceptance = draft, Acceptance(_FIRST_ODDS)
        self.newest, self.length = tokens[-1], len(tokens)
        self.few, self.is_over, self._chosen_at = DraftBlocks(), False, len(tokens)
        self._begins_at = len(tokens) + _FIRST_WITHOUT

    @property
    def guess_s(self) -> float:
        """See `Drafter`; this sequence's share of a joint guess."""
        return self._draft.guess_s

    def add(self, token: int) -> None:
        """See `Drafter`."""
        self.newest = token
        self.length += 1
        self._acceptance.add(token)

    def odds(self, most: int) -> list[float]:
        """See `Drafter`."""
        is_early = self.length < self._begins_at
        return [] if self.is_over or is_early else self._acceptance.odds(most)

    def guessed(self, guesses: Sequence[int]) -> None:
        """Record the guesses at the next tokens."""
        self._acceptance.guessed(guesses)

    def choose_if_stale(self) -> None:
        """Let the next guess choose blocks if the present ones led to a wrong guess, or were chosen long ago."""
        if self._acceptance.was_wrong or self.length >= self._chosen_at + _CHOSEN_FOR:
            self.few.choose_anew()
            self._chosen_at = self.length

    def release(self) -> None:
        """See `Drafter`."""
        self.few = DraftBlocks()


class SparseDraft:
    """Computes the guesses of sequences by the model that verifies them.

    Args:
        forward: the model's.

    Attributes:
        costs: the seconds of its steps.
    """

    def __init__(self, forward: ModelForward) -> None:
        self._forward, self.costs = forward, StepCosts()
        self._live: weakref.WeakSet[SparseDrafter] = weakref.WeakSet()
        # Other threads read `dram_bytes` while drafters are added.
        self._listing = threading.Lock()
        # Number of sequences in the last joint guess.
        self._together = 1

    @property
    def guess_s(self) -> float:
        """Seconds that a guess of one sequence takes, its share of a joint guess; 0 before the first measurement."""
        return self.costs.of(self._together) / self._together if self.costs.is_known else 0.0

    @property
    def dram_bytes(self) -> int:
        """DRAM of the mean keys by which blocks are chosen, bytes."""
        with self._listing:
            live = list(self._live)
        return sum(drafter.few.dram_bytes for drafter in live)

    def drafter(self, tokens: Sequence[int]) -> SparseDrafter:
        """A drafter of a sequence that has these tokens."""
        drafter = SparseDrafter(self, tokens)
        with self._listing:
            self._live.add(drafter)
        return drafter

    def guesses(
        self, drafters: Sequence[SparseDrafter], caches: Sequence[HeteroCache], counts: Sequence[int]
    ) -> list[list[int]]:
        """The next guesses of several sequences, `counts` of each; none if a forward fails, which ends the drafters.

        Args:
            caches: of the sequences, without their last tokens. They are the same afterwards.
        """
        found: list[list[int]] = [[] for _ in drafters]
        try:
            with self._forward.guessing(caches):
                self._guess(drafters, caches, counts, found)
        except Exception as error:
            _logger.warning("no more guesses by attention to few blocks in this answer (%s)", brief_error(error))
            for drafter in drafters:
                drafter.is_over = True
                drafter.release()
            return [[] for _ in drafters]
        for drafter, guesses in zip(drafters, found, strict=True):
            drafter.guessed(guesses)
        return found

    def _guess(
        self, drafters: Sequence[SparseDrafter], caches: Sequence[HeteroCache], counts: Sequence[int],
        found: list[list[int]],
    ) -> None:  # fmt: skip
        self._together = len(drafters)
        for drafter in drafters:
            drafter.choose_if_stale()
        guessing = list(range(len(drafters)))
        while guessing:
            began = time.perf_counter()
            tokens = [found[index][-1] if found[index] else drafters[index].newest for index in guessing]
            few = [drafters[index].few for index in guessing]
            logits = self._forward.guess([caches[index] for index in guessing], tokens, few)
            for index, row in zip(guessing, logits, strict=True):
                found[index].append(int(row.argmax()))
            self.costs.took(len(guessing), time.perf_counter() - began)
            guessing = [index for index in guessing if len(found[index]) < counts[index]]
