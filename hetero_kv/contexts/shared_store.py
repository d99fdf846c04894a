"""Contexts at an fsspec address, which several machines share, with a disk cache in front.

The address has chunks of blocks (`chunks.py`), and cards: one object per context with everything else (`cards.py`).
Both are named by the digest of their bytes. A listing of the cards is the index, so nothing is changed in place, and no
lock is needed. Chunks are written before the card that needs them.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hetero_kv.contexts import addresses
from hetero_kv.contexts.cards import Cards, card_of
from hetero_kv.contexts.chunks import BLOCKS_FOLDER, SUFFIX, ChunkWriter, chunk_name
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.disk_cache import DiskCache
from hetero_kv.contexts.identity import Identity
from hetero_kv.contexts.index import NewContext, StoredContext
from hetero_kv.contexts.index_entries import index_entries
from hetero_kv.contexts.medium import Medium, UnreachableError, at_once
from hetero_kv.contexts.saving import LoadedContext
from hetero_kv.contexts.shared_pruning import least_recently_used, remove_strays
from hetero_kv.contexts.store import ContextStore
from hetero_kv.contexts.uploads import Upload, Uploads
from hetero_kv.contexts.writing import write_context
from hetero_kv.durable_file import PARTIAL
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError, DamagedContextError

_logger = logging.getLogger(__name__)
# A card that is used is written again after this time, so that all machines see its last use.
_TOUCHED_S = 3600.0
# A new card's chunks may be invisible for this time, for example to an NFS client that has cached their absence.
_SETTLED_S = 60.0
# Time between two checks of the limit.
_PRUNED_S = 600.0
# How many contexts of one prefix are compared, the most recently used ones.
_CANDIDATES = 8


class SharedContextStore(ContextStore):
    """A ContextStore at an address. Saving and loading use the disk cache alone; `fetch` and uploads do the rest.

    Args:
        address: for fsspec, such as "s3://bucket/contexts".
        limit: bytes that all objects there may take; the least recently used contexts are removed first. None for no
            limit.
        folder: the disk cache.
        local_limit: bytes that it may take; the least recently used files are removed first. None for no limit.
        wait_s: the longest wait for the address, in one call and for one context, seconds.

    Raises ConfigError for an address that fsspec cannot use, and ContextError if the folder cannot be used. An address
    that does not answer is only logged.
    """

    is_remote = True

    def __init__(self, address: str, limit: int | None, folder: Path, local_limit: int | None, wait_s: float) -> None:
        self._medium = Medium(address, wait_s)
        super().__init__(folder, limit)
        self.where, self.wait_s = self._medium.address, wait_s
        self._disk = DiskCache(self.folder, local_limit)
        self._uploads = Uploads(self._medium, self.folder, self._prune_at_times)
        self._cards = Cards(self._medium, self._disk, self._uploads, lambda: self._index)
        self._pruned_at = time.monotonic()
        # File -> when its card was last written again, seconds since 1970.
        self._touched: dict[str, float] = {}
        with contextlib.suppress(UnreachableError):
            self._medium.require_there()

    @property
    def failures(self) -> int:
        """How often the address did not answer."""
        return self._medium.failures

    def close(self) -> None:
        """Upload what is saved, as long as the address answers in time, and close the index."""
        self._uploads.close(self.wait_s)
        super().close()

    # -- queries

    def contexts(self) -> list[StoredContext]:
        """All contexts, most recently used first. Raises UnreachableError."""
        self._cards.refresh()
        return super().contexts()

    def named(self, name: str) -> StoredContext:
        """The context of this name. Raises ContextError if there is none, and UnreachableError."""
        self._cards.refresh()
        return super().named(name)

    def total_bytes(self) -> int:
        """The size of all objects at the address, bytes. Raises UnreachableError."""
        cards, blocks = self._cards.take(), self._medium.names(BLOCKS_FOLDER)
        return sum(each.size for each in (*cards.values(), *blocks.values()))

    def path(self, stored: StoredContext) -> Path:
        """The path of a context's own file, once all its files are here. Raises ContextError if they cannot be."""
        self._bring(stored, None, time.monotonic() + self.wait_s)
        return super().path(stored)

    def fetch(
        self, identity: Identity, tokens: Sequence[int], least: int = 0, *, whole: bool = False, salt: str = ""
    ) -> None:
        """Fetch the context that `longest` finds, if it has at least `least` of the tokens.

        Raises UnreachableError if the address does not answer, or not in time; and ContextError if blocks of the
        context are missing or damaged there.
        """
        until = time.monotonic() + self.wait_s
        salted = addresses.salted(identity.digest, salt)
        self._cards.refresh(salted)
        self._bring_candidates(salted, tokens)
        found = self.longest(identity, tokens, whole=whole, salt=salt)
        if found is not None and found[1] >= least:
            self._bring(*found, until)

    def has_here(self, stored: StoredContext, tokens: int) -> bool:
        """Whether all files with a context's first tokens are in the disk cache."""
        try:
            with closing(OpenContext.at(self.folder / stored.file)) as context:
                return all((self.folder / name).exists() for name in _chunks(context, tokens))
        except ContextError:
            return False

    def _bring_candidates(self, identity: str, tokens: Sequence[int]) -> None:
        """Fetch the cards that `longest` compares first."""
        for address in reversed(addresses.prefix_addresses(identity, tokens[:-1])):
            candidates = self._index.with_prefix(address)[:_CANDIDATES]
            for stored in candidates:
                with contextlib.suppress(FileNotFoundError):
                    self._cards.bring(card_of(stored))
            if candidates:
                return

    def _bring(self, stored: StoredContext, first: int | None, until: float) -> None:
        """Fetch the chunks with a context's first tokens, or all, by the time `until`. Raises as `fetch`."""
        try:
            with closing(self._cards.opened(card_of(stored))) as context:
                chunks = _chunks(context, first)
            at_once(lambda name: self._bring_chunk(name, until), chunks)
        except FileNotFoundError as error:
            self._medium.require_there()
            if time.time() - stored.created > _SETTLED_S:
                self._cards.remove([stored])
            raise ContextError(f"{self.where}: an object of a context is gone ({error})") from error
        except DamagedContextError:
            # The context cannot be loaded; removed, it can be stored again.
            self._cards.remove([stored])
            raise
        self._shrink()
        if not all((self.folder / name).exists() for name in (stored.file, *chunks)):
            raise ContextError(
                f"a context of {stored.tokens:,} tokens does not fit into the disk cache {self.folder}; raise "
                "context_local_gb"
            )

    def _bring_chunk(self, name: str, until: float) -> None:
        if self._disk.has(name):
            return
        if time.monotonic() > until:
            raise UnreachableError(f"{self.where} is too slow: a context did not come within {self.wait_s:g} s")
        content = self._medium.read(f"{BLOCKS_FOLDER}/{name}")
        if chunk_name(content) != name:
            self._medium.remove([f"{BLOCKS_FOLDER}/{name}"])
            raise DamagedContextError(f"{self.where}/{BLOCKS_FOLDER}/{name} was damaged, and is removed")
        self._disk.add(name, content)

    # -- saving and loading

    def save(
        self, cache: HeteroCache, tokens: Sequence[int], name: str | None = None, notes: dict[str, Any] | None = None,
        identity: Identity | None = None, *, salt: str = "", per_tenant: int | None = None,
    ) -> StoredContext:  # fmt: skip
        """As `ContextStore.save`; the context is uploaded in the background."""
        identity, kept = self._savable(cache, name, notes, identity)
        salted = addresses.salted(identity.digest, salt)
        path = self._written(cache, tokens, kept, identity, salt)
        with closing(OpenContext.at(path)) as context:
            new = self._entries(path, context)
        index = self._index
        with index.changing():
            others = [each for each in index.of_identity(salted) if each.file != path.name]
            gone = [] if per_tenant is None else others[per_tenant - 1 :]
            replaced = None if name is None else index.named(name)
            if replaced is not None and replaced.file != path.name:
                gone.append(replaced)
            # Recorded before the index has it, because a context with neither card nor pending upload counts as
            # removed.
            self._uploads.add(Upload(card_of(new.stored), tuple(new.needs), tuple(map(card_of, gone))))
            index.add(new)
            self._cards.forget(gone)
        self._shrink()
        return new.stored

    def _written(
        self, cache: HeteroCache, tokens: Sequence[int], notes: dict[str, Any], identity: Identity, salt: str
    ) -> Path:
        """A card in the disk cache, named by its bytes: another rounding of the same tokens is another context."""
        unnamed = self.folder / (secrets.token_hex(16) + PARTIAL)
        try:
            writer = ChunkWriter(cache, self._disk, identity, salt)
            write_context(unnamed, cache, identity, [list(tokens)], notes, writer, survives=False, salt=salt)
            return unnamed.replace(self.folder / chunk_name(unnamed.read_bytes()))
        finally:
            unnamed.unlink(missing_ok=True)

    def load(self, stored: StoredContext, model: Any, **settings: Any) -> LoadedContext:
        """As `ContextStore.load`, of files that are here; damaged ones are removed here, and fetched again later."""
        try:
            loaded = super().load(stored, model, **settings)
        except DamagedContextError:
            self._drop_damaged(stored)
            raise
        if loaded.computed:
            self._drop_damaged(stored)
        return loaded

    def _drop_damaged(self, stored: StoredContext) -> None:
        if not self._uploads.has(stored.file):
            (self.folder / stored.file).unlink(missing_ok=True)
        for name in self._index.needs_of(stored.file):
            path = self.folder / name
            with contextlib.suppress(FileNotFoundError):
                if chunk_name(path.read_bytes()) != name:
                    path.unlink()

    def use(self, stored: StoredContext) -> None:
        """Set a context's time of use to now; after an hour the address hears of it too."""
        super().use(stored)
        now = time.time()
        if now - self._touched.get(stored.file, stored.created) > _TOUCHED_S and not self._uploads.has(stored.file):
            self._touched[stored.file] = now
            self._uploads.add(Upload(card_of(stored), ()))

    def _entries(self, path: Path, context: OpenContext) -> NewContext:
        return index_entries(path, context)

    def _shrink(self) -> None:
        surplus = [] if self._disk.limit is None else self._uploads.beyond(self._disk.limit)
        unnamed = {each.file: each for each in (self._index.contexts() if surplus else ()) if each.name is None}
        gone = [unnamed[upload.file] for upload in surplus if upload.file in unnamed]
        if gone:
            with self._index.changing():
                self._cards.forget(gone)
            _logger.warning(
                "contexts without a name that were not uploaded to %s in time are removed: %d do not fit into the disk "
                "cache %s (context_local_gb)",
                self.where, len(gone), self.folder,
            )  # fmt: skip
        self._disk.shrink(self._uploads.files(), SUFFIX)

    # -- removing

    def remove(self, stored: StoredContext) -> int:
        """Remove a context. Returns the bytes freed at the address; blocks that others need, or young ones, stay."""
        before = self.total_bytes()
        self._cards.remove([stored])
        remove_strays(self._medium, self._cards, self._index)
        return before - self.total_bytes()

    def prune(self, limit: int | None = None) -> tuple[list[StoredContext], int]:
        """Remove the least recently used contexts until at most `limit` bytes remain, and objects that none needs.

        Returns the removed contexts, and the bytes freed; young objects stay for some minutes (`remove_strays`).
        """
        most, before = self.limit if limit is None else limit, self.total_bytes()
        gone = [] if most is None else least_recently_used(self._medium, self._cards, self._index, most)
        self._cards.remove(gone)
        remove_strays(self._medium, self._cards, self._index)
        return gone, before - self.total_bytes()

    def _prune_at_times(self) -> None:
        if self.limit is not None and time.monotonic() - self._pruned_at > _PRUNED_S:
            self._pruned_at = time.monotonic()
            self.prune()


def _chunks(context: OpenContext, first: int | None) -> list[str]:
    """The files of the chunks with a context's first tokens, or all."""
    runs = [run for number in range(context.layouts) for run in context.first_runs(number, first)]
    return list(dict.fromkeys(run.file for run in runs if run.file))
