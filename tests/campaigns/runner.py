"""Runs tries in a child process, so that a hang or crash is counted and the next try follows."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from tests.campaigns.campaign import (
    ACCEPTED,
    CRASH,
    FOREIGN,
    HANG,
    REFUSED,
    WRONG,
    Tally,
    WrongResultError,
    campaigns,
    generator,
)

# Nobody waits as long for one file, however busy the machine.
HANG_SECONDS = 60.0
START_SECONDS = 300.0
# Memory that a process may allocate: less than a bomb needs, more than any of the files needs.
ROOM_BYTES = 4 << 30

# Not forked from this process, whose threads would be missing there, but from one that has imported what all need.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["hetero_kv.models", "hetero_kv.rules.injecting", "transformers.modeling_utils"])


def run(name: str, tries: int, seed: int = 0, progress: Callable[[int], None] = lambda done: None) -> Tally:
    """Make the tries 0 to `tries` of a campaign; `progress` is called with how many are done."""
    tally, done = Tally(name), 0
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        while done < tries:
            for number, outcome, detail in _answers(name, Path(scratch), seed, done, tries):
                tally.add(number, outcome, detail)
                done = number + 1
                progress(done)
    return tally


def _answers(name: str, scratch: Path, seed: int, first: int, tries: int):
    """(number, outcome, detail) of each try, until all are made or the process is gone."""
    folder = scratch / f"from-{first}"
    folder.mkdir()
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_work, args=(theirs, name, folder, seed, first, tries), daemon=False)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_SECONDS):
            raise RuntimeError(f"the campaign {name} was not prepared in {START_SECONDS:.0f} s")
        ours.recv()
        for number in range(first, tries):
            if not ours.poll(HANG_SECONDS):
                yield number, HANG, f"no answer in {HANG_SECONDS:.0f} s"
                return
            try:
                yield ours.recv()
            except EOFError:
                process.join()
                yield number, CRASH, f"the process ended with {process.exitcode}"
                return
    finally:
        _end(process)
        ours.close()
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End a process and those that it started."""
    if process.is_alive():
        process.join(1.0)
    if process.is_alive():
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.join()


def _work(pipe: Connection, name: str, folder: Path, seed: int, first: int, tries: int) -> None:
    campaign = campaigns()[name]
    kept = folder / "kept"
    kept.mkdir()
    prepared = campaign.prepare(kept)
    _limit_memory()
    pipe.send("ready")
    scratch = folder / "tries"
    scratch.mkdir()
    for number in range(first, tries):
        pipe.send((number, *_outcome(campaign, prepared, generator(seed, number), scratch)))


def _outcome(campaign, prepared, random, folder: Path) -> tuple[str, str]:
    from hetero_kv import HeteroKVError

    try:
        campaign.attempt(prepared, random, folder)
    except HeteroKVError as error:
        return REFUSED, str(error)
    except WrongResultError as error:
        return WRONG, str(error)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return FOREIGN, f"{type(error).__name__}: {str(error)[:300]} ({where.filename}:{where.lineno})"
    return ACCEPTED, ""


def _limit_memory() -> None:
    import resource

    limit = psutil.Process().memory_info().vms + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
