"""A draft model: a small model of the same vocabulary guesses the next tokens of a larger one.

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
from hetero_kv.rules.injection import Injection
from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.part_size import PartSize
from hetero_kv.serving.prefixes import Known, ResidentPrefixes
from hetero_kv.serving.speculation.draft_length import MOST_GUESSES, StepCosts
from hetero_kv.serving.speculation.model_drafter import ModelDrafter

_logger = logging.getLogger(__name__)
# A sequence with at most so many tokens to compute is in one forward with others: those of a whole draft and the next.
_FEW = MOST_GUESSES + 1
# The largest part of a prompt that is computed at once, tokens.
_PART = 2048
# Ended sequences that are kept for later ones with the same prefix, such as a conversation's next turn.
_KEPT = 16


class DraftModel:
    """Guesses the next tokens of sequences, which have caches of their own in one store.

    A sequence is prefilled in parts, one part of one sequence per step, so that no answer stalls; its answer continues
    without guesses meanwhile. A sequence reuses the keys and values of an earlier one with the same prefix. All
    prefilled sequences guess in joint forwards.

    Args:
        loaded: the model, with rules, whose layers can take tokens back (`ModelForward.why_no_drafts`).
        store: the store of its sequences' keys and values.
        vocab_size: number of the larger model's logits.
        longest_gap_s: a target for the time of a part of a prompt, seconds.

    Attributes:
        name: the model's, by which requests name it.
        costs: the seconds of its steps.
        rules: the rules in the model (`Injection`).
    """

    def __init__(self, loaded: LoadedModel, store: Store, vocab_size: int, longest_gap_s: float) -> None:
        self.name, self.costs = loaded.name, StepCosts()
        self._forward, self._store = ModelForward(loaded.model, loaded.tokenizer), store
        self.rules: Injection = loaded.model.hetero_kv_injection
        # Forks of a conversation guess in other threads.
        self._lock = self.rules.one_at_a_time
        self._vocab_size: int = loaded.model.config.get_text_config(decoder=True).vocab_size
        # The models' vocabularies may be padded to different sizes.
        self._common_size = min(vocab_size, self._vocab_size)
        self._kept = ResidentPrefixes(self.rules.attention_operators() if self.rules.needs_cache else None, _KEPT)
        self._live: weakref.WeakSet[ModelDrafter] = weakref.WeakSet()
        self._part_size = PartSize(longest_gap_s, _PART)
        # Whether its weights have been read: the first part waits for the disk and is not timed.
        self._is_warm = False
        # Number of sequences in the last joint guess.
        self._together = 1

    @property
    def dram_bytes(self) -> int:
        """DRAM of the store's blocks that were ever used, bytes."""
        return self._store.dram_bytes

    @property
    def guess_s(self) -> float:
        """Seconds that a guess of one sequence takes, its share of a joint guess; 0 before the first measurement."""
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

        A sequence has none during its prefill, and none if the draft model fails for it, which ends its drafter.

        Args:
            worth_s: of each sequence, the seconds that its guesses may save; a prefill that takes longer is not begun.
        """
        with self._lock:
            ready = self._ready(drafters, counts, worth_s)
            found = dict(zip(ready, self._guessed([(drafters[each], counts[each]) for each in ready]), strict=True))
        return [found.get(index, []) for index in range(len(drafters))]

    def release(self, drafter: ModelDrafter) -> None:
        """Release a sequence; its blocks are kept for sequences with the same prefix while memory allows."""
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
        """Free the blocks of released sequences."""
        with self._lock:
            while self._kept.drop_oldest():
                pass

    # -- prefill

    def _ready(self, drafters: Sequence[ModelDrafter], counts: Sequence[int], worth_s: Sequence[float]) -> list[int]:
        """Which sequences have only few tokens left to compute; a part of one of the others is computed now."""
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
        """Make a sequence's cache hold a prefix of its tokens and nothing else."""
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
        """Compute a part of a sequence, unless that takes longer than its guesses may save; returns whether it did."""
        # The last token is computed with those of other sequences, because its logits are guesses.
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
        """Drop kept sequences until more tokens of one fit. Raises CacheFullError if they do not fit even then."""
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
        """The guesses of sequences with few missing tokens; after a joint failure each guesses alone."""
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
        """Compute these tokens of each sequence. Returns the logits [vocab] after the last one of each."""
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
