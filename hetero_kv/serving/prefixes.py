"""Beginnings of prompts that are in memory already, from requests that go on or have ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.serving.stored_prefixes import StoredPrefixes


class Prefix(NamedTuple):
    """A stored sequence that begins as a prompt does.

    Attributes:
        cache: its cache.
        tokens: how many of the prompt's first tokens it has.
    """

    cache: HeteroCache
    tokens: int


class ResidentPrefixes:
    """The sequences of ended requests, kept until their memory is needed; the least recently used goes first.

    A prompt that begins as one of them does, or as a request does that is being answered, forks its cache, which
    shares the blocks, and computes the rest alone.

    Args:
        operators: the model's attention operators. Sequences are shared only where all of them attend to a later
            prompt as to one that came whole (`Operator.continues_exactly`), and derive nothing from a prompt's own
            queries (`Layout.finalizes_per_sequence`).
        most: how many sequences are kept.

    Attributes:
        stored: where sequences go that are not kept any more; None to drop them.
    """

    stored: StoredPrefixes | None = None

    def __init__(self, operators: Iterable[Any], most: int) -> None:
        listed = list(operators)
        self.are_shared = bool(listed) and all(operator.continues_exactly for operator in listed)
        self._most = most
        # By age, the least recently used first.
        self._kept: list[tuple[HeteroCache, np.ndarray]] = []
        # Those that are on the disk already.
        self._written: set[int] = set()

    def can_share(self, cache: HeteroCache) -> bool:
        """Whether prompts behind a beginning in such a cache are computed exactly."""
        return self.are_shared and _is_shareable(cache)

    def keep(self, cache: HeteroCache, tokens: Sequence[int]) -> None:
        """Keep the cache of an ended request, which stores `tokens`."""
        is_kept = tokens and self.can_share(cache)
        if not is_kept or not _is_current(cache, cache.injection.state()):
            cache.reset()
            return
        self._kept.append((cache, np.array(tokens)))
        if len(self._kept) > self._most:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Free the least recently used sequence. Returns whether there was one."""
        if not self._kept:
            return False
        cache, tokens = self._kept[0]
        self._write(cache, tokens)
        del self._kept[0]
        self._written.discard(id(cache))
        cache.reset()
        return True

    @property
    def kept(self) -> int:
        """How many sequences are kept."""
        return len(self._kept)

    @property
    def is_writing(self) -> bool:
        """Whether a kept sequence is still to be written."""
        return self.stored is not None and len(self._written) < len(self._kept)

    def write_one(self) -> None:
        """Write a sequence that is kept, if there is one, so that it leaves without delay later."""
        if self.is_writing:
            self._write(*next(each for each in self._kept if id(each[0]) not in self._written))

    def _write(self, cache: HeteroCache, tokens: np.ndarray) -> None:
        if self.stored is not None and id(cache) not in self._written:
            # Once, whether it works or not.
            self._written.add(id(cache))
            self.stored.keep(cache, tokens.tolist())

    def fork(self, prompt: Sequence[int], live: Iterable[tuple[HeteroCache, Sequence[int]]] = ()) -> Prefix | None:
        """A fork of the sequence with the longest common beginning, cut to it; None where no sequence begins alike.

        At least one token of the prompt is left to compute.

        Args:
            live: caches of requests that are being answered, and the tokens that they store.
        """
        new = np.array(prompt)
        candidates = [*self._kept, *((cache, np.array(tokens)) for cache, tokens in live if _is_shareable(cache))]
        best: tuple[HeteroCache, int] | None = None
        now = candidates[0][0].injection.state() if self.are_shared and candidates else None
        for cache, tokens in candidates if self.are_shared else []:
            common = _usable(cache, tokens, min(_common(tokens, new), len(new) - 1))
            if common and (best is None or common > best[1]) and _is_current(cache, now):
                best = cache, common
        if best is None:
            return None
        cache, common = best
        self._kept.sort(key=lambda kept: kept[0] is cache)
        forked = cache.fork()
        if common < forked.get_seq_length():
            forked.crop(common - forked.get_seq_length())
        return Prefix(forked, common)


def _is_shareable(cache: HeteroCache) -> bool:
    return not any(layout.finalizes_per_sequence for group in cache.groups for layout in group.layouts)


def _is_current(cache: HeteroCache, now: Any) -> bool:
    """Whether the prompts in a cache were computed under the model's present weights, adapters and hooks, `now`."""
    return all(now.is_like(each) for each in cache.computed_under)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """The length of the common beginning of two lists of tokens."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if len(different) else shorter


def _usable(cache: HeteroCache, tokens: np.ndarray, common: int) -> int:
    """How many of the common tokens a fork can keep: all, or none where layers cannot go back to them."""
    if common == len(tokens) or all(group.is_croppable for group in cache.groups):
        return common
    return 0
