"""Numba's on-disk cache, one process at a time, and whole whenever a process ends; names that no two kernels share.

All kernels that one function makes share an index file, whose entries name data files by number. Numba saves both
without a lock: of two processes that save at the same moment, each may take the same number for another kernel, and an
index that names a file before it is written lets a third load an older one. So does a process that ends between the
two, for numbers begin anew with every change of the source, and older files stay. A kernel of the wrong shape reads and
writes where it should not. Here whoever loads or saves holds a lock beside the index, and the index comes last.

A kernel's code is found by its name: the function's, the signature, and a number that Numba counts from 1 in every
process. Kernels that one function makes for several shapes differ in the number alone, so that two of them, compiled by
two processes, may have one name; and a third, which loads both, finds the code of one by the name of the other. Here
numbers begin at random, in every process.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from numba.core.bytecode import FunctionIdentity
from numba.core.caching import IndexDataCacheFile


@contextmanager
def _locked(index_path: str) -> Iterator[None]:
    """Hold the lock of an index; without one where files cannot be locked or made."""
    try:
        import fcntl

        descriptor = os.open(f"{index_path}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except (ImportError, OSError):
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    def with_lock(self: Any, *arguments: Any) -> Any:
        with _locked(self._index_path):
            return method(self, *arguments)

    return with_lock


def _save(self: Any, key: Any, data: Any) -> None:
    overloads = self._load_index()
    names = set(overloads.values())
    name = overloads.get(key) or next(name for name in map(self._data_name, count(1)) if name not in names)
    self._save_data(name, data)
    if key not in overloads:
        self._save_index({**overloads, key: name})


def _number_at_random() -> None:
    """Have the numbers of this process's kernels begin where no other process's do, but for one chance in 2 ** 60."""
    FunctionIdentity._unique_ids = count(int.from_bytes(os.urandom(10)) << 20)


def make_cache_safe() -> None:
    """Have Numba load and save kernels under the lock, and name them, as said above, from now on; once."""
    if not hasattr(IndexDataCacheFile, "hetero_kv_locks"):
        IndexDataCacheFile.hetero_kv_locks = True
        IndexDataCacheFile.save = _alone(_save)
        IndexDataCacheFile.load = _alone(IndexDataCacheFile.load)
        _number_at_random()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_number_at_random)
