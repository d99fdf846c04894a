"""Cards: one object per context at an address, with everything but its blocks. Their listing is the index."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from hetero_kv.contexts.chunks import SUFFIX
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.disk_cache import DiskCache
from hetero_kv.contexts.index import Index, NewContext, StoredContext
from hetero_kv.contexts.index_entries import index_entries
from hetero_kv.contexts.medium import Medium, ObjectInfo, UnreachableError, at_once
from hetero_kv.contexts.uploads import Uploads
from hetero_kv.engine.errors import ContextError, DamagedContextError

_logger = logging.getLogger(__name__)
_FOLDER = "contexts"
# The largest age of a listing that is used, seconds; listing takes at most a tenth of the time.
_FRESH_S, _FRESH_TIMES = 1.0, 10


def card_of(stored: StoredContext) -> str:
    """The path of a context's card at the address."""
    return f"{_FOLDER}/{stored.identity[:32]}/{stored.file}"


class Cards:
    """Keeps an index of the contexts at an address: each new card there is read once.

    Args:
        disk: stores the cards that were read.
        uploads: contexts on this machine that are not at the address yet.
        index: returns the index.
    """

    def __init__(self, medium: Medium, disk: DiskCache, uploads: Uploads, index: Callable[[], Index]) -> None:
        self._medium, self._disk, self._uploads, self._index = medium, disk, uploads, index
        self._listing = threading.Lock()
        # Identity, or "" for all -> when its listing becomes too old.
        self._fresh_until: dict[str, float] = {}
        # Paths of cards that cannot be used -> when they were written, and whether they are damaged.
        self._refused: dict[str, tuple[float | None, bool]] = {}

    def refresh(self, identity: str = "") -> None:
        """Update the index to the contexts of an identity at the address; "" for all. Raises UnreachableError."""
        with self._listing:
            began = time.monotonic()
            if began >= self._fresh_until.get(identity, 0.0):
                self.take(identity)
                took = time.monotonic() - began
                self._fresh_until[identity] = time.monotonic() + max(_FRESH_S, _FRESH_TIMES * took)

    def take(self, identity: str = "") -> dict[str, ObjectInfo]:
        """As `refresh`, however new the last listing is. Returns the cards by path."""
        index = self._index()
        # Contexts that were uploaded before the listing are in it, unless they were removed.
        known = {card_of(each): each for each in (index.of_identity(identity) if identity else index.contexts())}
        pending = self._uploads.pending()
        own, replaced = {upload.card for upload in pending}, {card for upload in pending for card in upload.replaces}
        cards = self._listed(identity)
        gone = [stored for card, stored in known.items() if card not in cards and card not in own]
        news = [
            card
            for card, info in cards.items()
            if card not in known
            and card not in replaced
            and self._refused.get(card, (None, False))[0] != (info.modified or -1.0)
        ]
        read = [new for new in at_once(lambda card: self._read(card, cards[card]), news) if new is not None]
        if gone or read:
            with index.changing():
                self.forget(gone)
                for new in read:
                    index.add(self._with_its_name(new, cards, own))
        return cards

    def _with_its_name(self, new: NewContext, cards: Mapping[str, ObjectInfo], own: Collection[str]) -> NewContext:
        """A context that is new here, without its name if a newer one has it. An older one loses its name.

        Machines that save under one name at the same time do not see each other's context, so both stay.

        Args:
            cards: the listed ones.
            own: cards that are not uploaded yet, and so newer than all others.
        """
        other = None if new.stored.name is None else self._index().named(new.stored.name)
        if other is None:
            return new

        def recency(stored: StoredContext) -> tuple[float, str]:
            card = card_of(stored)
            when = cards[card].modified if card in cards else math.inf if card in own else None
            return stored.created if when is None else when, card

        if recency(other) > recency(new.stored):
            return replace(new, stored=replace(new.stored, name=None))
        self._index().unname(other.file)
        return new

    def _listed(self, identity: str) -> dict[str, ObjectInfo]:
        folders = [identity[:32]] if identity else list(self._medium.names(_FOLDER))
        return {
            f"{_FOLDER}/{folder}/{name}": info
            for folder in folders
            for name, info in self._medium.names(f"{_FOLDER}/{folder}").items()
            if name.endswith(SUFFIX)
        }

    def _read(self, card: str, info: ObjectInfo) -> NewContext | None:
        """Fetch a card and return its index entries; None if it is gone, or cannot be used, which is logged."""
        try:
            with closing(self.opened(card)) as context:
                new = index_entries(context.file.path, context)
            if card_of(new.stored) != card:
                raise DamagedContextError(f"{card} is the context of another model or tenant")
        except FileNotFoundError:
            return None
        except UnreachableError:
            raise
        except ContextError as error:
            _logger.warning("a context at %s is not used: %s", self._medium.address, error)
            (self._disk.folder / Path(card).name).unlink(missing_ok=True)
            self._refused[card] = info.modified or -1.0, isinstance(error, DamagedContextError)
            return None
        when = time.time() if info.modified is None else info.modified
        return replace(new, stored=replace(new.stored, created=when, used=when))

    def unreadable(self, cards: Iterable[str]) -> tuple[list[str], list[str]]:
        """The cards that cannot be used: damaged ones, and others, such as those of another version."""
        refused = [(card, self._refused[card][1]) for card in cards if card in self._refused]
        return [card for card, damaged in refused if damaged], [card for card, damaged in refused if not damaged]

    def forget(self, gone: Iterable[StoredContext]) -> None:
        """Remove contexts from the index, and their pending uploads, within `changing`."""
        index = self._index()
        for each in gone:
            index.unlist(each.file)
            self._uploads.drop(each.file)
        for file in index.forget_unneeded():
            if not self._uploads.has(file):
                (self._disk.folder / file).unlink(missing_ok=True)

    def remove(self, gone: Iterable[StoredContext]) -> None:
        """Remove contexts at the address and on this machine. Raises UnreachableError."""
        listed = list(gone)
        self._medium.remove(map(card_of, listed))
        with self._index().changing():
            self.forget(listed)

    def opened(self, card: str) -> OpenContext:
        """Fetch and open a card. Raises as `bring`, and ContextError if it cannot be used."""
        path = self.bring(card)
        try:
            return OpenContext.at(path)
        except DamagedContextError:
            # After a power cut only this machine's copy may be damaged.
            path.unlink(missing_ok=True)
            return OpenContext.at(self.bring(card))

    def bring(self, card: str) -> Path:
        """The path of a card here. Raises FileNotFoundError if the address has none, and UnreachableError."""
        name = Path(card).name
        if not self._disk.has(name):
            self._disk.add(name, self._medium.read(card))
        return self._disk.folder / name
