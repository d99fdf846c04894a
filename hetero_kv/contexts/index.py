"""The SQLite index of a context folder: the contexts, the file of each block, and which files need which others.

All of it derives from the files, so a lost or damaged index is rebuilt from them.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import brief_error

#: Raised with every change of the tables; an index of another version is rebuilt.
_VERSION = 1
# Seconds that a process waits for another one's transaction.
_PATIENCE = 600
_TABLES = """
CREATE TABLE IF NOT EXISTS contexts (
    file TEXT PRIMARY KEY, name TEXT, identity TEXT NOT NULL, model TEXT NOT NULL, tokens INTEGER NOT NULL,
    bytes INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL, listed INTEGER NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS names ON contexts (name) WHERE listed AND name IS NOT NULL;
CREATE TABLE IF NOT EXISTS blocks (address BLOB PRIMARY KEY, file TEXT NOT NULL, row INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blocks_of ON blocks (file);
CREATE TABLE IF NOT EXISTS needs (file TEXT NOT NULL, other TEXT NOT NULL, PRIMARY KEY (file, other)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS beginnings (address BLOB NOT NULL, file TEXT NOT NULL, PRIMARY KEY (address, file))
    WITHOUT ROWID;
"""


@dataclass(frozen=True)
class StoredContext:
    """A context of a store.

    Attributes:
        file: its file name in the folder.
        name: the name it was saved under; None for one that was stored automatically.
        model: a readable name of the model.
        tokens: its length. A conversation includes one token without KV: the last of an answer.
        bytes: the size of its own file; blocks that existed before are in other files.
        created, used: seconds since 1970.
        identity: the digest of its Identity, under its tenant's salt.
    """

    file: str
    name: str | None
    model: str
    tokens: int
    bytes: int
    created: float
    used: float
    identity: str


@dataclass(frozen=True)
class NewContext:
    """The index entries of a newly written context.

    Attributes:
        blocks: addresses of the blocks in its own file, each with its row there.
        needs: other files that contain blocks of it.
        prefixes: addresses of the prefixes of its tokens.
    """

    stored: StoredContext
    blocks: Sequence[tuple[bytes, int]]
    needs: Sequence[str]
    prefixes: Sequence[bytes]


class Index:
    """The tables. Every change is within `changing`, which admits one process at a time."""

    NAME: ClassVar = "index.sqlite"

    def __init__(self, folder: Path | None) -> None:
        """Open the index of an existing folder, or an empty one in memory.

        Raises sqlite3.DatabaseError if the file is no valid index.
        """
        self.path = None if folder is None else folder / self.NAME
        self._changing = threading.RLock()
        # Threads share it; `changing` lets one at a time begin a transaction.
        self._database = sqlite3.connect(
            self.path or ":memory:", timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )
        try:
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"the index has version {version} instead of {_VERSION}")
            if not version:
                self._database.executescript(f"{_TABLES} PRAGMA user_version = {_VERSION};")
            (found,) = self._database.execute("PRAGMA quick_check").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @classmethod
    def discard(cls, folder: Path) -> None:
        """Rename an unusable index to `*.damaged`."""
        for path in (folder / cls.NAME, folder / f"{cls.NAME}-journal"):
            if path.exists():
                os.replace(path, path.with_name(f"{path.name}.damaged"))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A transaction: it excludes other writers, and its changes are atomic.

        Raises ContextError if they cannot be written, as on a full disk.
        """
        with self._changing, self._transaction():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                # On a full disk SQLite may have rolled back already.
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            raise ContextError(
                f"{self.path} cannot be written ({brief_error(error)}); free disk space, or check the folder's "
                "permissions. The stored contexts are unchanged"
            ) from error

    # -- queries

    def contexts(self) -> list[StoredContext]:
        """The listed contexts, most recently used first."""
        return self._stored("listed ORDER BY used DESC, created DESC")

    def named(self, name: str) -> StoredContext | None:
        """The listed context of this name; None if there is none."""
        return next(iter(self._stored("listed AND name = ?", name)), None)

    def _stored(self, where: str, *values: object) -> list[StoredContext]:
        names = "file, name, model, tokens, bytes, created, used, identity"
        rows = self._database.execute(f"SELECT {names} FROM contexts WHERE {where}", values)
        return [StoredContext(*row) for row in rows]

    def files(self) -> set[str]:
        """All known files, including unlisted ones that other files need."""
        return {file for (file,) in self._database.execute("SELECT file FROM contexts")}

    def total_bytes(self) -> int:
        """The size of all files, bytes."""
        (total,) = self._database.execute("SELECT COALESCE(SUM(bytes), 0) FROM contexts").fetchone()
        return int(total)

    def needs_of(self, file: str) -> set[str]:
        """The other files that contain blocks of a context."""
        return {other for (other,) in self._database.execute("SELECT other FROM needs WHERE file = ?", (file,))}

    def block(self, address: bytes) -> tuple[str, int] | None:
        """The file that contains a block, and the block's row there; None for an unknown address."""
        return self._database.execute("SELECT file, row FROM blocks WHERE address = ?", (address,)).fetchone()

    def with_prefix(self, address: bytes) -> list[StoredContext]:
        """The listed contexts that have a prefix with this address, most recently used first."""
        where = "listed AND file IN (SELECT file FROM beginnings WHERE address = ?) ORDER BY used DESC, tokens DESC"
        return self._stored(where, address)

    def of_identity(self, identity: str) -> list[StoredContext]:
        """The listed contexts of an identity, most recently used first."""
        return self._stored("listed AND identity = ? ORDER BY used DESC, created DESC", identity)

    # -- within `changing`

    def add(self, new: NewContext) -> None:
        """Add a context; an earlier one of its name is unlisted."""
        stored, execute = new.stored, self._database.execute
        if stored.name is not None:
            execute("UPDATE contexts SET listed = 0 WHERE name = ? AND listed", (stored.name,))
        row = (
            stored.file, stored.name, stored.identity, stored.model, stored.tokens, stored.bytes, stored.created,
            stored.used,
        )  # fmt: skip
        execute("INSERT OR REPLACE INTO contexts VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1)", row)
        many = self._database.executemany
        many("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?)", [(at, stored.file, row) for at, row in new.blocks])
        many("INSERT OR IGNORE INTO needs VALUES (?, ?)", [(stored.file, other) for other in new.needs])
        many("INSERT OR IGNORE INTO beginnings VALUES (?, ?)", [(at, stored.file) for at in new.prefixes])

    def use(self, file: str) -> None:
        """Set a context's time of use to now."""
        self._database.execute("UPDATE contexts SET used = ? WHERE file = ?", (time.time(), file))

    def unlist(self, file: str) -> None:
        """Unlist a context; its file stays while others need it."""
        self._database.execute("UPDATE contexts SET listed = 0 WHERE file = ?", (file,))

    def unname(self, file: str) -> None:
        """Take the name from a context, which stays listed."""
        self._database.execute("UPDATE contexts SET name = NULL WHERE file = ?", (file,))

    def forget_unneeded(self) -> list[str]:
        """Remove the entries of unlisted files that no other file needs. Returns their names."""
        forgotten: list[str] = []
        unneeded = "SELECT file FROM contexts WHERE NOT listed AND file NOT IN (SELECT other FROM needs)"
        while found := [file for (file,) in self._database.execute(unneeded)]:
            self._forget(found)
            forgotten += found
        return forgotten

    def _forget(self, files: Iterable[str]) -> None:
        for file in files:
            for table in ("contexts", "blocks", "needs", "beginnings"):
                self._database.execute(f"DELETE FROM {table} WHERE file = ?", (file,))
