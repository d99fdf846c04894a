"""Which replicas have which beginnings: an index from hashes to replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence


class Holders:
    """Hash of a beginning -> the replicas that have it, as bits of a number; replicas are numbered from 0."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._beginnings: defaultdict[int, set[int]] = defaultdict(set)

    def set(self, replica: int, hashes: Iterable[int]) -> None:
        """The replica has these beginnings, and no others any more."""
        now, before, masks, bit = set(hashes), self._beginnings[replica], self._masks, 1 << replica
        for each in before - now:
            mask = masks[each] & ~bit
            if mask:
                masks[each] = mask
            else:
                del masks[each]
        self._beginnings[replica] = before & now
        self.add(replica, now - before)

    def add(self, replica: int, hashes: Iterable[int]) -> None:
        """The replica has these beginnings too."""
        known, masks, bit = self._beginnings[replica], self._masks, 1 << replica
        for each in hashes:
            if each not in known:
                known.add(each)
                masks[each] = masks.get(each, 0) | bit

    def depths(self, hashes: Sequence[int]) -> dict[int, int]:
        """Replica -> how many of a prompt's blocks it has, of those that have any."""
        found: dict[int, int] = {}
        seen, masks = 0, self._masks
        if not masks:
            return found
        for depth in range(len(hashes), 0, -1):
            new = masks.get(hashes[depth - 1], 0) & ~seen
            seen |= new
            while new:
                lowest = new & -new
                found[lowest.bit_length() - 1] = depth
                new ^= lowest
        return found
