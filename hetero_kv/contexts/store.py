"""A folder of contexts, which share the blocks of their common prefixes."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hetero_kv.contexts import addresses
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.identity import Identity
from hetero_kv.contexts.index import Index, NewContext, StoredContext
from hetero_kv.contexts.index_entries import index_entries, with_blocks
from hetero_kv.contexts.names import require_name
from hetero_kv.contexts.placement import BlockPlacement
from hetero_kv.contexts.saving import LoadedContext, load_context
from hetero_kv.contexts.writing import write_context
from hetero_kv.durable_file import PARTIAL, sync_folder
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.errors import brief_error, shown

_logger = logging.getLogger(__name__)
_SUFFIX = ".safetensors"
_NOT_WRITABLE = 0o555


class ContextStore:
    """Contexts of one sequence each in one folder, found by name or by their tokens.

    Contexts share blocks: a file contains only new blocks, and references the files with the others. A file is removed
    when no context needs it any more. Several processes may use one folder.

    Args:
        folder: where they are.
        limit: bytes that all files may take; the least recently used contexts are removed first. None for no limit.
        makes: whether a missing folder or index is created; if False, the contexts are listed in memory.

    Attributes:
        where: the name of the place in messages.
        is_remote: whether contexts must be fetched before they are loaded.
        wait_s: the longest wait for one, seconds.

    Raises ContextError if the folder cannot be used.
    """

    is_remote = False
    wait_s = 0.0

    def __init__(self, folder: str | Path, limit: int | None = None, *, makes: bool = True) -> None:
        self.folder, self.limit, self._makes = Path(folder).expanduser(), limit, makes
        self.where = str(self.folder)
        try:
            if makes or self.folder.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise ContextError(
                f"{self.folder} cannot hold contexts ({brief_error(error)}); name another folder (context_folder)"
            ) from error

    def _open(self) -> None:
        self._opened_index = self._opened()
        path = self._opened_index.path
        self._opened_status = None if path is None else os.stat(path)

    @property
    def _index(self) -> Index:
        """The index of the present folder: a folder that was unmounted may return, or be replaced by another.

        Raises ContextError while there is none.
        """
        path, status = self._opened_index.path, self._opened_status
        if path is None or status is None:
            return self._opened_index
        try:
            if not os.path.samestat(os.stat(path), status):
                self._opened_index.close()
                self._open()
        except FileNotFoundError as error:
            if not self.folder.is_dir():
                raise ContextError(
                    f"{self.folder} is gone; mount or create it, and it is used again (context_folder)"
                ) from error
            self._opened_index.close()
            self._open()
        return self._opened_index

    def _opened(self) -> Index:
        is_there = (self.folder / Index.NAME).exists()
        try:
            index = Index(self.folder if is_there or self._makes else None)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            _logger.warning("%s: its index is damaged (%s), and is rebuilt", self.folder, brief_error(error))
            Index.discard(self.folder)
            is_there, index = False, Index(self.folder)
        if not is_there:
            with index.changing():
                for path in sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime):
                    with contextlib.suppress(ContextError), closing(OpenContext.at(path)) as context:
                        index.add(self._entries(path, context))
        return index

    def close(self) -> None:
        """Close the index."""
        self._opened_index.close()

    def __enter__(self) -> ContextStore:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- queries

    @property
    def failures(self) -> int:
        """How often an address did not answer; 0 for a folder."""
        return 0

    def contexts(self) -> list[StoredContext]:
        """All contexts, most recently used first."""
        return self._index.contexts()

    def named(self, name: str) -> StoredContext:
        """The context of this name. Raises ContextError if there is none."""
        found = self._index.named(name)
        if found is None:
            known = ", ".join(each.name for each in self.contexts() if each.name)
            raise ContextError(f"there is no context {shown(name, 80)} in {self.where}; there are: {known or 'none'}")
        return found

    def total_bytes(self) -> int:
        """The size of all files, bytes."""
        return self._index.total_bytes()

    def path(self, stored: StoredContext) -> Path:
        """The path of a context's own file."""
        return self.folder / stored.file

    def fetch(
        self, identity: Identity, tokens: Sequence[int], least: int = 0, *, whole: bool = False, salt: str = ""
    ) -> None:
        """Fetch the context that `longest` finds, if it has at least `least` of the tokens; does nothing here."""

    def has_here(self, stored: StoredContext, tokens: int) -> bool:
        """Whether all files with a context's first tokens are on this machine; True for a folder."""
        return True

    # -- saving and loading

    def save(
        self, cache: HeteroCache, tokens: Sequence[int], name: str | None = None, notes: dict[str, Any] | None = None,
        identity: Identity | None = None, *, salt: str = "", per_tenant: int | None = None,
    ) -> StoredContext:  # fmt: skip
        """Store the KV of a cache of one sequence; an earlier context of the same name is replaced.

        Args:
            tokens: its token ids, at least as many as are stored.
            name: the context's name; None for none.
            identity: that of the model now, where it is known; None computes it.
            salt: of the tenant that owns the context; others do not find it. "" for callers without tenants.
            per_tenant: how many contexts of this model the tenant may have; its least recently used ones are removed.
                None: no limit.

        Raises ContextError if it cannot be saved; earlier contexts are then unchanged.
        """
        identity, kept = self._savable(cache, name, notes, identity)
        file = secrets.token_hex(16) + _SUFFIX
        path = self.folder / file
        index = self._index
        with index.changing():
            try:
                salted = addresses.salted(identity.digest, salt)
                placement = BlockPlacement(index, self.folder, salted, list(tokens)[: cache.lengths[0]])
                write_context(path, cache, identity, [list(tokens)], kept, placement, salt=salt)
                # Read-only: other contexts may share its blocks.
                path.chmod(path.stat().st_mode & _NOT_WRITABLE)
                with closing(OpenContext.at(path)) as context:
                    new = self._entries(path, context)
                index.add(new)
                for surplus in index.of_identity(salted)[per_tenant:] if per_tenant is not None else ():
                    index.unlist(surplus.file)
                unneeded = index.forget_unneeded() + self._over_limit(new.stored)
            except BaseException:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
        self._unlink(unneeded)
        return new.stored

    def _savable(
        self, cache: HeteroCache, name: str | None, notes: dict[str, Any] | None, identity: Identity | None
    ) -> tuple[Identity, dict[str, Any]]:
        """A cache's identity, and the notes with which it is saved. Raises ContextError if it cannot be."""
        if name is not None:
            require_name(name)
        if len(cache.sequences) != 1:
            raise ContextError(f"the cache has {len(cache.sequences)} sequences; store one at a time, or save a file")
        if identity is None:
            identity = cache.injection.identity
        assert identity is not None
        return identity, dict(notes or {}) | {"name": name}

    def load(self, stored: StoredContext, model: Any, **settings: Any) -> LoadedContext:
        """Load a context; see `load_context`."""
        loaded = load_context(self.folder / stored.file, model, **settings)
        if stored.name is not None and loaded.notes.get("name") != stored.name:
            raise DamagedContextError(f"{self.where}: its index calls {stored.file} {shown(stored.name)}, wrongly")
        self.use(stored)
        return loaded

    def use(self, stored: StoredContext) -> None:
        """Set a context's time of use to now; a failure to write is only logged."""
        try:
            with self._index.changing():
                self._index.use(stored.file)
        except ContextError as error:
            _logger.debug("%s: the use of a context is not noted: %s", self.where, error)

    def details(self, stored: StoredContext) -> dict[str, Any]:
        """The metadata of a context's file: version, dtype, operators, turns, and the files with its blocks."""
        with closing(OpenContext.at(self.path(stored))) as context:
            notes = context.metadata.get("notes")
            turns = notes.get("turns") if isinstance(notes, dict) else None
            operators = {str(layer.get("operator")) for layer in context.identity.layers.values()}
            return {
                "version": context.metadata.get("version"),
                "dtype": context.identity.dtype,
                "weights": context.identity.weights[:12],
                "operators": sorted(operators),
                "turns": len(turns) if isinstance(turns, list) else None,
                "files": [stored.file, *self._entries(self.path(stored), context).needs],
            }

    def longest(
        self, identity: Identity, tokens: Sequence[int], *, whole: bool = False, salt: str = ""
    ) -> tuple[StoredContext, int] | None:
        """The context with the longest common prefix with `tokens`, and the prefix's length; None without a match.

        The prefix excludes the last token, since a prompt must compute at least one.

        Args:
            whole: whether the context must be a prefix of `tokens` as a whole, because its layers cannot roll back.
            salt: of the tenant; contexts of others are not found.
        """
        salted = addresses.salted(identity.digest, salt)
        for address in reversed(addresses.prefix_addresses(salted, tokens[:-1])):
            best: tuple[StoredContext, int] | None = None
            for stored in self._index.with_prefix(address):
                with contextlib.suppress(ContextError), closing(OpenContext.at(self.folder / stored.file)) as context:
                    saved = context.stored_tokens[0]
                    common = _common(saved, tokens[:-1])
                    if (best is None or common > best[1]) and not (whole and common < len(saved)):
                        best = stored, common
            if best is not None:
                return best
        return None

    def verify(self, stored: StoredContext) -> list[str]:
        """Describes the damage of a context, a line each; [] if it is intact."""
        try:
            with closing(OpenContext.at(self.path(stored))) as context:
                return [str(error) for error in context.damage()]
        except ContextError as error:
            return [str(error)]

    def _entries(self, path: Path, context: OpenContext) -> NewContext:
        """The index entries of a file. Raises DamagedContextError if it is no context of one sequence."""
        return with_blocks(index_entries(path, context), context)

    # -- removing

    def remove(self, stored: StoredContext) -> int:
        """Remove a context. Returns the bytes freed; blocks that other contexts need stay."""
        index = self._index
        with index.changing():
            before = index.total_bytes()
            index.unlist(stored.file)
            unneeded = index.forget_unneeded()
            freed = before - index.total_bytes()
        self._unlink(unneeded)
        return freed

    def prune(self, limit: int | None = None) -> tuple[list[StoredContext], int]:
        """Remove the least recently used contexts until at most `limit` bytes remain, and files without a context.

        Returns the removed contexts, and the bytes freed in total.
        """
        index = self._index
        with index.changing():
            sizes = self._file_sizes()
            stray = [name for name in sizes if name not in index.files()]
            before, gone = index.contexts(), self._over_limit(None, limit)
            left = {each.file for each in index.contexts()}
        self._unlink([*stray, *gone])
        return [each for each in before if each.file not in left], sum(sizes.values()) - sum(
            self._file_sizes().values()
        )

    def _file_sizes(self) -> dict[str, int]:
        """File name -> bytes, for all files of contexts in the folder, complete or partial."""
        found = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name.endswith((_SUFFIX, _SUFFIX + PARTIAL)):
                with contextlib.suppress(FileNotFoundError):
                    found[path.name] = path.stat().st_size
        return found

    def _over_limit(self, newest: StoredContext | None, limit: int | None = None) -> list[str]:
        """Unlist contexts until the files fit the limit; returns the files that are no longer needed."""
        most, unneeded = self.limit if limit is None else limit, self._index.forget_unneeded()
        for stored in reversed(self._index.contexts()):
            if most is None or self._index.total_bytes() <= most:
                break
            if newest is None or stored.file != newest.file:
                self._index.unlist(stored.file)
                unneeded += self._index.forget_unneeded()
        if newest is not None and most is not None and self._index.total_bytes() > most:
            raise ContextError(
                f"the context takes {newest.bytes:,} bytes, and all contexts may take {most:,}; raise "
                "context_cache_gb, or save it elsewhere (HeteroCache.save)"
            )
        return unneeded

    def _unlink(self, files: Sequence[str]) -> None:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / file)
        if files:
            sync_folder(self.folder)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix."""
    for index, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return index
    return min(len(one), len(other))
