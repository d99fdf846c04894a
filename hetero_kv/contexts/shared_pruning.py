"""Pruning of an address: removes the least recently used contexts beyond a limit, and objects that no context needs."""

from __future__ import annotations

import logging
import time
from collections import Counter

from hetero_kv.contexts.cards import Cards, card_of
from hetero_kv.contexts.chunks import BLOCKS_FOLDER
from hetero_kv.contexts.index import Index, StoredContext
from hetero_kv.contexts.medium import PARTIAL, Medium
from hetero_kv.contexts.uploads import GRACE_S

_logger = logging.getLogger(__name__)


def least_recently_used(medium: Medium, cards: Cards, index: Index, most: int) -> list[StoredContext]:
    """The contexts without which all others take `most` bytes. Raises UnreachableError."""
    there, blocks = cards.take(), medium.names(BLOCKS_FOLDER)
    contexts = [each for each in index.contexts() if card_of(each) in there]
    total = sum(each.size for each in (*there.values(), *blocks.values()))
    needed = Counter(chunk for each in contexts for chunk in index.needs_of(each.file))
    gone = []
    for stored in sorted(contexts, key=lambda each: max(each.used, there[card_of(each)].modified or 0.0)):
        if total <= most:
            break
        gone.append(stored)
        needs = index.needs_of(stored.file)
        needed.subtract(needs)
        total -= stored.bytes + sum(blocks[chunk].size for chunk in needs if not needed[chunk] and chunk in blocks)
    return gone


def remove_strays(medium: Medium, cards: Cards, index: Index) -> None:
    """Remove chunks that no card needs, parts of objects, and damaged cards, unless they are young.

    Young ones may belong to a context that is being uploaded. Raises UnreachableError.
    """
    old = time.time() - GRACE_S
    there = cards.take()
    damaged, others = cards.unreadable(there)
    medium.remove(card for card in damaged if (there[card].modified or old) < old)
    if others:
        _logger.warning(
            "%s has contexts of another version of hetero-kv, so that no blocks are removed: %s",
            medium.address, ", ".join(others[:4]),
        )  # fmt: skip
        return
    needed = {chunk for each in index.contexts() for chunk in index.needs_of(each.file)}
    for folder, kept in ((BLOCKS_FOLDER, needed), (PARTIAL, set[str]())):
        medium.remove(
            f"{folder}/{name}"
            for name, info in medium.names(folder).items()
            if name not in kept and (info.modified or old) < old
        )
