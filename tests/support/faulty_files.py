"""An fsspec file system in memory that fails, is slow, or hangs when a test says so: "faulty://NAME"."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FaultyFiles(MemoryFileSystem):
    """Files in memory, without `file://`-like atomic writes.

    Attributes:
        error: raised by every operation; None for none.
        write_error: raised by those that write; None for none.
        delay_s: the time that each operation takes.
        running: every operation waits until it is set.
        operations: names of the operations so far, each with its path.
    """

    protocol = "faulty"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    error: ClassVar[Exception | None] = None
    write_error: ClassVar[Exception | None] = None
    delay_s: ClassVar[float] = 0.0
    running: ClassVar[threading.Event] = threading.Event()
    operations: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def reset(cls):
        """Empty and sound again."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.operations.clear()
        cls.error, cls.write_error, cls.delay_s = None, None, 0.0
        cls.running.set()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("faulty://"))

    def _begin(self, name, path):
        self.operations.append((name, str(path)))
        self.running.wait()
        time.sleep(self.delay_s)
        error = self.error or (self.write_error if name in ("pipe", "mv", "rm") else None)
        if error is not None:
            raise error

    def info(self, path, **options):
        self._begin("info", path)
        return super().info(path, **options)

    def ls(self, path, detail=True, **options):
        self._begin("ls", path)
        return super().ls(path, detail=detail, **options)

    def cat_file(self, path, **options):
        self._begin("cat", path)
        return super().cat_file(path, **options)

    def pipe_file(self, path, value, **options):
        self._begin("pipe", path)
        super().pipe_file(path, value, **options)

    def mv(self, path1, path2, **options):
        self._begin("mv", path2)
        self.store[path2] = self.store.pop(path1)

    def rm_file(self, path):
        self._begin("rm", path)
        super().rm_file(path)


fsspec.register_implementation("faulty", FaultyFiles, clobber=True)
