"""Makes Numba's on-disk cache safe for several processes and for processes that end while saving.

Index files. All kernels that one function creates share an index file, whose entries name data files by number. Numba
saves both without a lock. Two processes that save at the same time may use one number for two kernels. An index that
names a data file before it is written lets another process load an older file of that number, because numbers restart
with every change of the source and older files remain; a process that ends between the two writes leaves the same
state. A kernel of the wrong shape then reads and writes out of bounds. Here loading and saving take a lock next to the
index, and the index is written last.

Symbol names. A kernel's code is found by its name: the function's name, the signature, and a number that Numba counts
from 1 in every process. Kernels that one function creates for several shapes differ only in that number. Two kernels
compiled by two processes may therefore have the same name, and a third process that loads both finds the code of one
under the name of the other. Here each process starts counting at a random number.

Module names. A kernel's file names the module that compiled it, which loading imports. A kernel of a clone from before
the package had its present name would import the module a second time under the former name, and wait for its own lock.
Here the package's name is part of a kernel's key.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from numba.core.bytecode import FunctionIdentity
from numba.core.caching import IndexDataCacheFile

from hetero_kv.cpu_ops.kernel_loading import with_names

_load_by_key = IndexDataCacheFile.load


@contextmanager
def _locked(index_path: str) -> Iterator[None]:
    """Lock an index within a `with` block; do nothing if files cannot be locked or created."""
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


def _load(self: Any, key: Any) -> Any:
    return _load_by_key(self, (__package__, key))


def _save(self: Any, key: Any, data: Any) -> None:
    key = (__package__, key)
    overloads = self._load_index()
    names = set(overloads.values())
    name = overloads.get(key) or next(name for name in map(self._data_name, count(1)) if name not in names)
    self._save_data(name, with_names(data))
    if key not in overloads:
        self._save_index({**overloads, key: name})


def _number_at_random() -> None:
    """Start the numbers of this process's kernels at random; two processes collide with probability 2 ** -60."""
    FunctionIdentity._unique_ids = count(int.from_bytes(os.urandom(10)) << 20)


def make_cache_safe() -> None:
    """Patch Numba's cache with the lock and the random numbers described above; further calls do nothing."""
    if not hasattr(IndexDataCacheFile, "hetero_kv_locks"):
        IndexDataCacheFile.hetero_kv_locks = True
        IndexDataCacheFile.save = _alone(_save)
        IndexDataCacheFile.load = _alone(_load)
        _number_at_random()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_number_at_random)
