"""Fixtures for every part of the suite."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.support.devices import device_called, simulated_cuda
from tests.support.shared_compilation import compiled_by_one

# An example may wait for a kernel's compilation, or for other processes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Where the whole suite is collected, every second worker first imports its files from the last to the first.

    Without compiled modules, rewriting assertions takes as long as all other imports. Two workers meet in the middle,
    and each loads from `__pycache__` what the other has compiled.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    if int(worker) % 2 == 0 or session.config.args != session.config.getini("testpaths"):
        return
    tests = Path(__file__).parent
    for path in sorted(tests.rglob("test_*.py"), reverse=True):
        # A file that cannot be imported, or skips itself, says so when it is collected.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(tests.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side, files that begin with the same kernels do not begin together.

    One worker would compile the kernels for half a minute while another waits for them. A file of tests/calls does so
    before all others, while the other worker runs files that need none; the rest of tests/calls, and the campaigns,
    come in the middle: at the end one worker would run them alone.
    """
    first, folders = "test_caches_in_threads.py", ("calls", "campaigns")
    compiling = [item for item in items if item.path.name == first]
    later = [item for item in items if item.path.parent.name in folders and item.path.name != first]
    chosen = {*compiling, *later}
    others = [item for item in items if item not in chosen]
    middle = len(others) // 2
    items[:] = [*compiling, *others[:middle], *later, *others[middle:]]


def pytest_collection_finish() -> None:
    """Automatic collections come seldom: of what is not frozen, most is alive too."""
    _freeze()
    gc.set_threshold(5_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a file leaves behind, models and kernels that other files use again, stays as well."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Collect garbage, and leave what is alive out of all later collections.

    Whole collections, which engines and tests ask for, would take up to half a second among imported modules.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_core_for_each_worker():
    """Where tests run side by side, torch has one thread, and `threads_num: auto` is one.

    Threads of one process would wait for the other's. A kernel's own tests give it as many as there are.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    from hetero_kv.threads import set_threads

    set_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "cpu_count", lambda logical=True: 1)
        # For the processes that tests start.
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(autouse=True, scope="session")
def kernels_are_compiled_once(tmp_path_factory):
    """Where tests run side by side, a worker waits for a kernel that another one compiles."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with compiled_by_one(tmp_path_factory.getbasetemp().parent):
        yield


@pytest.fixture(scope="module")
def one_thread():
    """One thread for torch and kernels. In many small steps threads would wait for each other longer than they work."""
    import torch

    from hetero_kv.threads import set_threads

    threads = torch.get_num_threads()
    set_threads(1)
    yield
    set_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def kernels_as_they_are_needed():
    """Tests compile the kernels that they call; caches would compile all that a model may ever call.

    Gives what caches have do that outside of tests.
    """
    from hetero_kv.rules.preparing import Preparation

    original = Preparation.compile_for_first_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Preparation, "compile_for_first_cache", lambda _: None)
        yield original


@pytest.fixture
def prepares(monkeypatch, kernels_as_they_are_needed):
    """The first cache of a model compiles its kernels, as it does outside of tests."""
    from hetero_kv.rules.preparing import Preparation

    monkeypatch.setattr(Preparation, "compile_for_first_cache", kernels_as_they_are_needed)


@pytest.fixture(scope="session")
def smollm2():
    """The small real model on the CPU in float32, fetched into the usual cache; for tests marked `model`."""
    from hetero_kv.models import load_model

    return load_model("smollm2-135m-instruct", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """Its tokenizer, without the weights; for tests marked `model`."""
    from hetero_kv.models import open_model

    return open_model("smollm2-135m-instruct", device="cpu").tokenizer


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """The CPU, then `cuda`, which is simulated where there is no GPU."""
    with device_called(request.param) as found:
        yield found


@pytest.fixture
def gpu():
    """A simulated GPU."""
    with simulated_cuda() as simulation:
        yield simulation


@pytest.fixture
def no_other_caches(monkeypatch):
    """Caches that other tests have left behind reserve no memory."""
    import weakref

    from hetero_kv.engine import reservations

    gc.collect()
    monkeypatch.setattr(reservations, "_live", weakref.WeakSet())
