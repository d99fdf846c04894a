"""A draft model: a small model of the same vocabulary guesses what a larger one says next.

Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318) with greedy guesses.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from hetero_kv.engine.errors import CacheFullError
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError, brief_error
from hetero_kv.models.loading import LoadedModel
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.part_size import PartSize
from hetero_kv.serving.prefixes import Known, ResidentPrefixes
from hetero_kv.serving.speculation.draft_length import MOST_GUESSES, StepCosts
from hetero_kv.serving.speculation.model_drafter import ModelDrafter

_logger = logging.getLogger(__name__)
# The most tokens of a sequence that pass in one forward with the last tokens of others: those of a whole draft, and the
# one behind.
_FEW = MOST_GUESSES + 1
# The most tokens of a prompt that pass at once.
_PART = 2048
# Sequences whose tokens stay, for those that begin alike: a conversation's next turn, a document's next question.
_KEPT = 16


class DraftModel:
    """Guesses the next tokens of sequences, which have caches of their own in one store.

    A sequence's tokens pass in parts, one part of one sequence a step, so that neither its own answer nor others stand
    still: the answer goes on without guesses meanwhile. One that begins as an earlier one takes over its keys and
    values. All sequences that have passed guess in joint forwards.

    Args:
        loaded: the model, with rules, whose layers can take tokens back (`ModelForward.why_no_drafts`).
        store: has room for the sequences.
        vocab_size: number of the larger model's logits.
        longest_gap_s: what a part of a prompt shall take at the most, seconds.

    Attributes:
        name: the model's, by which requests name it.
        costs: what its steps take.
    """

    def __init__(self, loaded: LoadedModel, store: Store, vocab_size: int, longest_gap_s: float) -> None:
        self.name, self.costs = loaded.name, StepCosts()
        self._forward, self._store = ModelForward(loaded.model, loaded.tokenizer), store
        injection = loaded.model.hetero_kv_injection
        # Forks of a conversation guess in threads of their own.
        self._lock = injection.one_at_a_time
        self._vocab_size: int = loaded.model.config.get_text_config(decoder=True).vocab_size
        # Padding of the one may go beyond that of the other.
        self._common_size = min(vocab_size, self._vocab_size)
        self._kept = ResidentPrefixes(injection.attention_operators(), _KEPT)
        self._live: weakref.WeakSet[ModelDrafter] = weakref.WeakSet()
        self._part_size = PartSize(longest_gap_s, _PART)
        # Whether its weights have been read: the first part waits for the disk, and says nothing of its speed.
        self._is_warm = False
        # How many sequences guessed together last.
        self._together = 1

    @property
    def dram_bytes(self) -> int:
        """DRAM of the store's blocks that were ever used, bytes."""
        return self._store.dram_bytes

    @property
    def guess_s(self) -> float:
        """Seconds that a guess of one of the sequences takes, which guess together; 0 before it was measured."""
        return self.costs.of(self._together) / self._together if self.costs.is_known else 0.0

    def drafter(self, tokens: Sequence[int], tenant: str = "") -> ModelDrafter:
        """A drafter of a tenant's sequence that has these tokens."""
        drafter = ModelDrafter(self, tokens, tenant)
        with self._lock:
            self._live.add(drafter)
        return drafter

    def guesses(
        self, drafters: Sequence[ModelDrafter], counts: Sequence[int], worth_s: Sequence[float]
    ) -> list[list[int]]:
        """The next guesses of several sequences, at most `counts` of each.

        A sequence has none while its tokens pass, and none if the draft model fails for it, which ends its drafter.

        Args:
            worth_s: of each sequence, the seconds that its guesses may save; a prompt that takes longer does not pass.
        """
        with self._lock:
            ready = self._ready(drafters, counts, worth_s)
            found = dict(zip(ready, self._guessed([(drafters[each], counts[each]) for each in ready]), strict=True))
        return [found.get(index, []) for index in range(len(drafters))]

    def release(self, drafter: ModelDrafter) -> None:
        """Take back the memory of a sequence, and keep it for sequences that begin alike while there is room."""
        with self._lock:
            cache = drafter.cache
            if cache is None:
                return
            try:
                drafter.go_back()
                tokens, drafter.cache = drafter.stored, None
                self._kept.keep(cache, tokens, (), drafter.tenant)
            except Exception as error:
                # Its blocks are free once nothing refers to it.
                _logger.warning("a sequence of the draft model is not kept (%s)", brief_error(error))
            finally:
                drafter.cache = None

    def close(self) -> None:
        """Free what is kept of sequences that were given back."""
        with self._lock:
            while self._kept.drop_oldest():
                pass

    # -- what has passed

    def _ready(self, drafters: Sequence[ModelDrafter], counts: Sequence[int], worth_s: Sequence[float]) -> list[int]:
        """Which of the sequences have only few tokens to pass; of one of the others a part passes now."""
        ready, passes = [], False
        for index, (drafter, count, seconds) in enumerate(zip(drafters, counts, worth_s, strict=True)):
            try:
                self._begin(drafter)
                missing = len(drafter.missing)
                assert drafter.cache is not None
                if missing <= _FEW and drafter.cache.get_seq_length():
                    self._require_room(drafter, missing + count - 1)
                    ready.append(index)
                elif not passes:
                    passes = self._pass_part(drafter, seconds)
            except Exception as error:
                drafter.end(error)
        return ready

    def _begin(self, drafter: ModelDrafter) -> None:
        """Let a sequence's cache have a beginning of its tokens and nothing else."""
        if drafter.cache is not None:
            drafter.go_back()
            return
        live = [
            Known(each.cache, np.array(each.stored), (), each.tenant)
            for each in self._live
            if each.cache is not None and each.stored
        ]
        found = self._kept.find(drafter.tokens, live, drafter.tenant).cache
        drafter.begin(self._forward.new_cache(self._store) if found is None else found)

    def _pass_part(self, drafter: ModelDrafter, worth_s: float) -> bool:
        """Pass a part of a sequence; returns whether it was worth that."""
        # The last one passes with those of others, because its logits are guesses.
        missing, speed = drafter.missing[:-1], self._part_size.tokens_per_s
        if speed is not None and len(missing) / speed > worth_s:
            return False
        part = missing[: self._part_size.of(len(missing), rows=1)]
        self._require_room(drafter, len(part))
        began = time.perf_counter()
        self._require_tokens(part)
        drafter.passing(part)
        assert drafter.cache is not None
        self._forward.prompt(drafter.cache, part)
        if self._is_warm:
            self._part_size.passed(len(part), time.perf_counter() - began)
        self._is_warm = True
        return True

    def _require_room(self, drafter: ModelDrafter, tokens: int) -> None:
        """Drop kept sequences until there is room for more tokens of one. Raises CacheFullError if that is in vain."""
        cache = drafter.cache
        assert cache is not None
        while True:
            try:
                return cache.require_room(1, tokens)
            except CacheFullError:
                if cache.get_seq_length() + tokens > self._store.capacity or not self._kept.drop_oldest():
                    raise

    def _require_tokens(self, tokens: Sequence[int]) -> None:
        if max(tokens) >= self._vocab_size:
            raise HeteroKVError(f"token {max(tokens)} is not one of its {self._vocab_size}")

    # -- guessing

    def _guessed(self, rows: Sequence[tuple[ModelDrafter, int]]) -> list[list[int]]:
        """The guesses of sequences of which few tokens are missing; those that fail together guess one by one."""
        if not rows:
            return []
        found: list[list[int]] = [[] for _ in rows]
        try:
            self._guess(rows, found)
        except Exception as error:
            if len(rows) > 1:
                _logger.warning("%d sequences do not guess together (%s)", len(rows), brief_error(error))
                for drafter, _ in rows:
                    drafter.go_back()
                return [self._guessed([row])[0] for row in rows]
            rows[0][0].end(error)
            return [[]]
        for (drafter, _), guesses in zip(rows, found, strict=True):
            drafter.guessed(guesses)
        return found

    def _guess(self, rows: Sequence[tuple[ModelDrafter, int]], found: list[list[int]]) -> None:
        self._together = len(rows)
        passing = [drafter.missing for drafter, _ in rows]
        for tokens in passing:
            self._require_tokens(tokens)
        logits = self._passed([drafter for drafter, _ in rows], passing)
        for drafter, _ in rows:
            drafter.has_caught_up()
        guessing = list(range(len(rows)))
        while True:
            for index, row in zip(guessing, logits, strict=True):
                found[index].append(int(row[: self._common_size].argmax()))
            guessing = [index for index in guessing if len(found[index]) < rows[index][1]]
            if not guessing:
                return
            logits = self._passed([rows[index][0] for index in guessing], [[found[index][-1]] for index in guessing])

    def _passed(self, drafters: Sequence[ModelDrafter], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Pass these tokens of each sequence. Returns the logits [vocab] behind the last one of each."""
        began = time.perf_counter()
        for drafter, each in zip(drafters, tokens, strict=True):
            drafter.passing(each)
        caches = [drafter.cache for drafter in drafters if drafter.cache is not None]
        if max(map(len, tokens)) == 1:
            logits = list(self._forward.decode(caches, [each[0] for each in tokens]))
        else:
            logits = [each[-1] for each in self._forward.verify(caches, tokens)[0]]
        self.costs.took(sum(map(len, tokens)), time.perf_counter() - began)
        return logits
