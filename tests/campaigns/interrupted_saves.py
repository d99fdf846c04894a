"""Processes that save contexts are killed, run out of disk space or run side by side: no context is lost or wrong."""

from __future__ import annotations

import os
import random as randomness
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.campaigns.campaign import Campaign, WrongResultError
from tests.campaigns.kills import forked, killed
from tests.campaigns.saved_contexts import Prepared, following, prepare
from tests.campaigns.small_disks import is_possible, on_small_disk

_PROCESSES = 4
# A disk for both contexts twice, with an index.
_DISK = 4 << 20


class Measured(NamedTuple):
    """What all tries share, and the most seconds that a child took to save in a file and in a store."""

    contexts: Prepared
    seconds: tuple[float, float]
    has_disks: bool


def prepare_saves(folder: Path) -> Measured:
    """The contexts, saved in each way once."""
    contexts = prepare(folder)
    store = folder / "store"
    _store_first(contexts, store)
    ways = lambda: contexts.caches[1].save(folder / "probe", contexts.tokens), lambda: _store(contexts, store, "probe")
    return Measured(contexts, (_seconds(ways[0]), _seconds(ways[1])), is_possible(folder))


def _seconds(work: Callable[[], None]) -> float:
    """What a child takes that does it: the longest of some."""
    took = []
    for _ in range(3):
        start = time.perf_counter()
        os.waitpid(forked(work), 0)
        took.append(time.perf_counter() - start)
    return max(took)


def attempt_kills(prepared: Measured, random: randomness.Random, folder: Path) -> None:
    """A process that is killed while it saves: in a file in place of another, or in a store.

    A process that finishes saving before its kill must load what it saved; another one is then killed earlier.
    """
    seconds, attempt = random.choice(list(zip(prepared.seconds, (_kill_of_file, _kill_of_store), strict=True)))
    while not attempt(prepared.contexts, _emptied(folder), random.uniform(0, seconds)):
        seconds *= 0.9


def _kill_of_file(contexts: Prepared, home: Path, after: float) -> bool:
    path = home / "c"
    path.write_bytes(contexts.files[0])
    was_killed = killed(lambda: contexts.caches[1].save(path, contexts.tokens), after)
    if not was_killed and path.read_bytes() != contexts.files[1]:
        raise WrongResultError("what was saved is not there")
    _require_either(contexts, path)
    return was_killed


def _kill_of_store(contexts: Prepared, home: Path, after: float) -> bool:
    _store_first(contexts, home)
    was_killed = killed(lambda: _store(contexts, home, "killed"), after)
    _require_whole(contexts, home, {"first"} if was_killed else {"first", "killed"}, may_be={"killed"})
    return was_killed


def attempt_several(prepared: Measured, random: randomness.Random, folder: Path) -> None:
    """Processes that save at once, under one name, or in one store, where one is killed meanwhile."""
    home, contexts = _emptied(folder), prepared.contexts
    if random.random() < 0.3:
        path = home / "c"
        path.write_bytes(contexts.files[0])
        _require_done(
            [forked(lambda which=n % 2: contexts.caches[which].save(path, contexts.tokens)) for n in range(_PROCESSES)]
        )
        _require_either(contexts, path)
        return
    _store_first(contexts, home)
    others = [forked(lambda name=f"other {n}": _store(contexts, home, name)) for n in range(_PROCESSES - 1)]
    work = lambda: _store(contexts, home, "killed")  # noqa: E731
    was_killed = killed(work, random.uniform(0, _PROCESSES * prepared.seconds[1]))
    _require_done(others)
    stored = {"first", *(f"other {n}" for n in range(_PROCESSES - 1))}
    _require_whole(contexts, home, stored if was_killed else stored | {"killed"}, may_be={"killed"})


def attempt_full(prepared: Measured, random: randomness.Random, folder: Path) -> None:
    """A save on a disk that is full at some moment, and once more when there is room again."""
    home, contexts = _emptied(folder), prepared.contexts
    room = random.randrange(2 * len(contexts.files[1]))
    work = _fill_file if random.random() < 0.5 else _fill_store
    if prepared.has_disks:
        on_small_disk(home, _DISK, lambda: work(contexts, home, room))
    else:
        _in_child(lambda: work(contexts, home, None, room))


def _fill_file(contexts: Prepared, home: Path, room: int | None, longest: int | None = None) -> None:
    path = home / "c"
    path.write_bytes(contexts.files[0])
    with _Full(home, room, longest) as full:
        full.attempt(lambda: contexts.caches[1].save(path, contexts.tokens))
        if path.read_bytes() not in contexts.files or [each.name for each in home.glob("c*")] != ["c"]:
            raise WrongResultError("what is there is neither the old context nor the new one")
    contexts.caches[1].save(path, contexts.tokens)
    if path.read_bytes() != contexts.files[1]:
        raise WrongResultError("what is saved when there is room is another context")


def _fill_store(contexts: Prepared, home: Path, room: int | None, longest: int | None = None) -> None:
    _store_first(contexts, home)
    with _Full(home, room, longest) as full:
        was_stored = full.attempt(lambda: _store(contexts, home, "second"))
        _require_whole(contexts, home, {"first", "second"} if was_stored else {"first"}, is_forked=True)
    if not was_stored:
        _store(contexts, home, "second")
    _require_whole(contexts, home, {"first", "second"}, is_forked=True)


class _Full:
    """Within this context the disk has this many bytes left or, without a small disk, limits the size of every file."""

    def __init__(self, home: Path, room: int | None, longest: int | None) -> None:
        self._filler, self._room, self._longest = home / "filler", room, longest

    def __enter__(self) -> _Full:
        if self._room is not None:
            disk = os.statvfs(self._filler.parent)
            with self._filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, disk.f_bavail * disk.f_frsize - self._room))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._longest or 0, resource.RLIM_INFINITY))
        return self

    def __exit__(self, *raised: object) -> None:
        if self._room is not None:
            self._filler.unlink()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def attempt(self, save: Callable[[], None]) -> bool:
        """Whether there was room. Anything but an error of ours passes."""
        from hetero_kv.engine.errors import ContextError

        try:
            save()
        except ContextError:
            return False
        return True


def _emptied(folder: Path) -> Path:
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    return home


def _store_first(contexts: Prepared, folder: Path) -> None:
    from hetero_kv.contexts.store import ContextStore

    with ContextStore(folder) as store:
        store.save(contexts.caches[0], contexts.tokens[0], "first")


def _store(contexts: Prepared, folder: Path, name: str) -> None:
    from hetero_kv.contexts.store import ContextStore

    with ContextStore(folder) as store:
        store.save(contexts.caches[1], contexts.tokens[0], name)


def _in_child(work: Callable[[], None]) -> None:
    _require_done([forked(work)])


def _require_done(children: list[int]) -> None:
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(statuses):
        raise WrongResultError("a process failed to save")


def _require_either(contexts: Prepared, path: Path) -> None:
    """The file is one of the contexts; the next process replaces it and leaves no temporary file."""
    if path.read_bytes() not in contexts.files:
        raise WrongResultError("what is there is neither the old context nor the new one")
    contexts.caches[1].save(path, contexts.tokens)
    if path.read_bytes() != contexts.files[1] or [each.name for each in path.parent.iterdir()] != [path.name]:
        raise WrongResultError(f"there are {[each.name for each in path.parent.iterdir()]}")


def _require_whole(
    contexts: Prepared, folder: Path, names: set[str], may_be: set[str] = frozenset(), is_forked: bool = False
) -> None:
    """A store has exactly these contexts, and the first continues as before; pruned, it has no other file.

    A process that `is_forked` runs no model, because it lacks the threads.
    """
    from hetero_kv.contexts.store import ContextStore

    with ContextStore(folder) as store:
        there = {each.name for each in store.contexts()}
        if not names <= there <= names | may_be:
            raise WrongResultError(f"there are {sorted(there)}, not {sorted(names)}")
        if damage := [line for each in store.contexts() for line in store.verify(each)]:
            raise WrongResultError(damage[0])
        logits = None if is_forked else following(contexts.model, store.path(store.named("first")), repair=False)
        store.prune()
        files = {each.name for each in store.folder.glob("*.safetensors*")}
        if files != {each.file for each in store.contexts()}:
            raise WrongResultError(f"there are {sorted(files)}")
    if logits is not None and not logits.equal(contexts.expected):
        raise WrongResultError("something else follows the context that was stored first")


CAMPAIGNS = (
    Campaign("kills of saves", 2, prepare_saves, attempt_kills),
    Campaign("several saves", 3, prepare_saves, attempt_several),
    Campaign("saves on full disks", 4, prepare_saves, attempt_full),
)
