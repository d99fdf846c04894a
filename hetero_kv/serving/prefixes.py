"""Prefixes of prompts that are in memory, from running and ended requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.serving.checkpoints import KeptCheckpoint, newest_within
from hetero_kv.serving.queues import with_caches
from hetero_kv.serving.request import Request
from hetero_kv.serving.reuse import Reuse
from hetero_kv.serving.status import SequenceStatus
from hetero_kv.serving.stored_prefixes import StoredPrefixes

#: How many of a sequence's newest checkpoints are saved with it: the end of its prompt, the position before the answer,
#: and the end of its document.
_STORED = 3
#: Tokens that are soon computed again: about one small part of a prompt.
_FEW = 64


class Prefix(NamedTuple):
    """The longest known prefix of a prompt.

    Attributes:
        cache: a fork of its sequence, cut to the prefix; None if nothing can be reused.
        reuse: how much is reused, and why no more.
        checkpoints: the sequence's checkpoints within the prefix.
    """

    cache: HeteroCache | None
    reuse: Reuse
    checkpoints: tuple[KeptCheckpoint, ...] = ()


class Known(NamedTuple):
    """A sequence in memory.

    Attributes:
        cache: its cache.
        tokens: ids of the tokens that it stores.
        checkpoints: the states that its layers can return to.
        tenant: its owner; prompts of other tenants do not find it.
    """

    cache: HeteroCache
    tokens: np.ndarray
    checkpoints: tuple[KeptCheckpoint, ...] = ()
    tenant: str = ""

    def begins(self, other: Known) -> bool:
        """Whether another sequence of its tenant has all of its tokens at its beginning."""
        return self.tenant == other.tenant and _common(self.tokens, other.tokens) == len(self.tokens)

    def is_nearly_in(self, other: Known) -> bool:
        """Whether a prompt that goes on from this sequence finds all but its last `_FEW` tokens in another one."""
        length = len(self.tokens) - _FEW
        if self is other or self.tenant != other.tenant or not 0 < length <= len(other.tokens):
            return False
        # Most of them differ there.
        is_alike = self.tokens[length - 1] == other.tokens[length - 1]
        return bool(is_alike and _common(self.tokens, other.tokens) >= length and other.usable(length) == length)

    def usable(self, common: int) -> int:
        """How many of the `common` first tokens a fork can keep."""
        if common == len(self.tokens) or all(group.can_crop_to(common) for group in self.cache.groups):
            return common
        point = newest_within(self.checkpoints, common)
        return 0 if point is None else point.length

    def cut(self, tokens: int) -> HeteroCache:
        """A fork with the first `tokens` tokens, which are `usable`."""
        forked = self.cache.fork()
        if tokens < len(self.tokens):
            point = newest_within(self.checkpoints, tokens)
            is_needed = point is not None and not all(group.can_crop_to(tokens) for group in forked.groups)
            try:
                forked.crop(tokens - len(self.tokens), point if is_needed else None)
            except BaseException:
                # The error's traceback, which a stream may keep, refers to the fork.
                forked.reset()
                raise
        return forked


class ResidentPrefixes:
    """The sequences of ended requests, kept until their memory is needed: then the least recently used is dropped.

    A prompt that shares a prefix with one of them, or with a running request, forks that cache, shares its blocks, and
    computes only the rest. Of two sequences of which one begins with the other, the longer one is kept, where layers
    can roll back to any token: otherwise, each turn of a conversation would push another document out. Where there are
    too many, those that differ from another one in their last tokens are dropped first: questions about one document.

    Args:
        operators: the model's attention operators. Sequences are shared only if all of them compute a continued prompt
            as a whole one (`Operator.continues_exactly`), and derive nothing from a prompt's own queries
            (`Layout.finalizes_per_sequence`). None shares none, because the model itself does not continue exactly.
        max_kept: how many sequences are kept.

    Attributes:
        stored: stores sequences that leave memory; None to drop them.
    """

    stored: StoredPrefixes | None = None

    def __init__(self, operators: Iterable[Any] | None, max_kept: int) -> None:
        listed = list(operators or ())
        self.are_shared = operators is not None and all(operator.continues_exactly for operator in listed)
        self._operators = listed
        self._max_kept = max_kept
        # The least recently used first.
        self._kept: list[Known] = []
        # Whether writing each sequence worked, by the id of its cache; absent if it was not tried.
        self._written: dict[int, bool] = {}

    def can_share(self, cache: HeteroCache) -> bool:
        """Whether prompts that reuse a prefix of such a cache are computed exactly."""
        return self.are_shared and _is_shareable(cache)

    @property
    def caches(self) -> list[HeteroCache]:
        """The caches of all kept sequences."""
        return [each.cache for each in self._kept]

    def sequences(self, can_roll_back: bool) -> list[SequenceStatus]:
        """The kept sequences, the most recently used first. Any thread may call it.

        can_roll_back: whether all layers can roll back to any token.
        """
        return [
            SequenceStatus(
                each.cache, each.tokens, "kept", tenant=each.tenant, is_stored=self._written.get(id(each.cache), False),
                lengths=None if can_roll_back else [*(point.length for point in each.checkpoints), len(each.tokens)],
            )
            for each in reversed(list(self._kept))
        ]  # fmt: skip

    def keep(
        self, cache: HeteroCache, tokens: Sequence[int], checkpoints: Sequence[KeptCheckpoint] = (), tenant: str = ""
    ) -> None:
        """Keep the cache of a tenant's ended request, which stores `tokens` and has these checkpoints."""
        is_kept, now = tokens and self.can_share(cache), cache.injection.state()
        if not is_kept or not _is_current(cache, now):
            cache.reset()
            return
        within = tuple(each for each in checkpoints if each.length < len(tokens))
        new = Known(cache, np.array(tokens), within, tenant)
        if cache.is_croppable:
            for each in [each for each in self._kept if each.begins(new)]:
                self._drop(each)
            longer = [each for each in self._kept if new.begins(each) and _is_current(each.cache, now)]
            if longer:
                self._use(longer[-1])
                cache.reset()
                return
        self._kept.append(new)
        if len(self._kept) > self._max_kept:
            self._drop_least_missed()

    def drop_oldest(self) -> bool:
        """Free the least recently used sequence. Returns whether there was one."""
        if not self._kept:
            return False
        self._write(self._kept[0])
        self._drop(self._kept[0])
        return True

    def _drop_least_missed(self) -> None:
        """Drop the least recently used sequence of those that others have but for a few tokens, or of all.

        The first is not written, which all requests would wait for: the others are, once they leave.
        """
        for each in self._kept:
            if any(map(each.is_nearly_in, self._kept)):
                self._drop(each)
                return
        self.drop_oldest()

    def _use(self, known: Known) -> None:
        # It is the most recently used one now. In a new list: one that is being sorted is empty for other threads.
        self._kept = sorted(self._kept, key=lambda kept: kept.cache is known.cache)

    def _drop(self, known: Known) -> None:
        self._kept = [each for each in self._kept if each.cache is not known.cache]
        self._written.pop(id(known.cache), None)
        known.cache.reset()

    @property
    def kept(self) -> int:
        """How many sequences are kept."""
        return len(self._kept)

    @property
    def is_writing(self) -> bool:
        """Whether a kept sequence has not been written yet."""
        return self.stored is not None and len(self._written) < len(self._kept)

    def write_one(self) -> None:
        """Write a kept sequence, if there is one, so that it can be dropped later without delay."""
        if self.is_writing:
            self._write(next(each for each in self._kept if id(each.cache) not in self._written))

    def _write(self, known: Known) -> None:
        if self.stored is not None and id(known.cache) not in self._written:
            # Once, whether it works or not.
            self._written[id(known.cache)] = False
            tokens = known.tokens.tolist()
            self._written[id(known.cache)] = self.stored.keep(known.cache, tokens, known.tenant)
            lengths = {each.length for each in known.checkpoints if each.point is not None}
            for length in sorted(() if self.stored.can_roll_back else lengths)[-_STORED:]:
                # It shares the blocks of the whole sequence, and has its own states.
                prefix = known.cut(length)
                try:
                    self.stored.keep(prefix, tokens[:length], known.tenant)
                finally:
                    prefix.reset()

    def common(self, prompt: Sequence[int], tenant: str = "", live: Iterable[Known] = ()) -> int:
        """The length of the longest prefix of a tenant's prompt that a kept sequence has. Other threads may call it.

        live: sequences of running requests, which count too.
        """
        new = np.array(prompt)
        known = (each for each in (*self._kept, *live) if each.tenant == tenant)
        return max((_common(each.tokens, new) for each in known), default=0)

    def stored_tokens(self, prompt: Sequence[int], tenant: str = "") -> int:
        """The length of the longest prefix of a tenant's prompt that a stored sequence has."""
        found = None if self.stored is None else self.stored.longest(prompt, 0, tenant)
        return 0 if found is None else found[1]

    def choosing_queries(self, length: int, question: int | None) -> int:
        """As `AttentionOperator.choosing_queries`, of all operators."""
        return max((operator.choosing_queries(length, question) for operator in self._operators), default=0)

    def find(
        self, prompt: Sequence[int], live: Iterable[Known] = (), tenant: str = "",
        reusable: Callable[[int], int] = lambda common: common,
    ) -> Prefix:  # fmt: skip
        """The longest prefix of a tenant's prompt in memory, as a fork of its sequence.

        At least one token of the prompt is left to compute.

        Args:
            live: sequences of running requests.
            reusable: how many tokens of a common prefix may be reused, if layers can roll back to there.
        """
        if not self.are_shared:
            return Prefix(None, Reuse(reason="not_exact"))
        listed = [each for each in (*self._kept, *live) if each.tenant == tenant]
        candidates = [each for each in listed if _is_shareable(each.cache)]
        if not candidates:
            return Prefix(None, Reuse(reason="not_exact" if listed else "nothing_kept"))
        new, now = np.array(prompt), candidates[0].cache.injection.state()
        commons = [min(_common(each.tokens, new), len(new) - 1) for each in candidates]
        # Among equals, the most recently used.
        longest = max(range(len(candidates)), key=lambda number: (commons[number], number))
        common, alike = commons[longest], candidates[longest]
        best: tuple[int, Known] | None = None
        for count, each in zip(commons, candidates, strict=True):
            usable = each.usable(reusable(count))
            if usable and (best is None or usable > best[0]) and _is_current(each.cache, now):
                best = usable, each
        tokens, known = (0, None) if best is None else best
        reuse = Reuse(tokens, "differs", common, "memory" if tokens else None)
        if tokens == len(new) - 1:
            reuse = replace(reuse, reason="all")
        elif not common:
            reuse = replace(reuse, reason="nothing_alike")
        elif tokens < reusable(common) and not _is_current(alike.cache, now):
            reuse = replace(reuse, reason="other_weights")
        elif tokens < reusable(common):
            kinds = {kind for group in alike.cache.groups for kind in group.stuck(reusable(common))}
            reuse = replace(reuse, reason="cannot_go_back", kind=", ".join(sorted(kinds)))
        elif tokens < common:
            reuse = replace(reuse, reason="chooses")
        elif known is not None and tokens == len(known.tokens):
            reuse = replace(reuse, reason="extends")
        if known is None:
            return Prefix(None, reuse)
        self._use(known)
        return Prefix(known.cut(tokens), reuse, tuple(each for each in known.checkpoints if each.length <= tokens))


def sequences_of(requests: Iterable[Request]) -> list[Known]:
    """The sequences of running requests."""
    return [
        Known(cache, np.array(each.tokens[: each.stored]), tuple(each.checkpoints), each.tenant)
        for each, cache in with_caches(requests)
    ]


def _is_shareable(cache: HeteroCache) -> bool:
    return not any(layout.finalizes_per_sequence for group in cache.groups for layout in group.layouts)


def _is_current(cache: HeteroCache, now: Any) -> bool:
    """Whether the prompts in a cache were computed under the model's present weights, adapters and hooks, `now`."""
    return all(now.is_like(each) for each in cache.computed_under)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """The length of the common prefix of two lists of tokens."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if len(different) else shorter
