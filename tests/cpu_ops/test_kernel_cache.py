"""Processes that save kernels at the same moment do not mix them up."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba import njit
from numba.core import config
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

import hetero_kv.cpu_ops.code_version  # noqa: F401  has Numba's cache locked
from hetero_kv.cpu_ops import kernel_cache, list_attention, token_store, weight_blocks, weight_unpack
from hetero_kv.cpu_ops.cpu_features import isa
from tests.support.shared_compilation import compiled_by_one

pytestmark = pytest.mark.skipif(os.name != "posix", reason="locks are POSIX's")
PROCESSES, KERNELS = 4, 25


def _save_and_load(folder, number, start, wrong):
    cache = IndexDataCacheFile(folder, "kernel", "stamp")
    start.wait()
    for kernel in range(KERNELS):
        cache.save((number, kernel), f"{number} {kernel}")
        found = cache.load((number, kernel))
        if found != f"{number} {kernel}":
            wrong.put((number, kernel, found))


def test_kernels_are_those_that_were_saved(tmp_path):
    context = multiprocessing.get_context("fork")
    start, wrong = context.Event(), context.Queue()
    arguments = [(str(tmp_path), number, start, wrong) for number in range(PROCESSES)]
    processes = [context.Process(target=_save_and_load, args=each) for each in arguments]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join()
    assert wrong.empty()
    whole = IndexDataCacheFile(str(tmp_path), "kernel", "stamp")
    for number in range(PROCESSES):
        for kernel in range(KERNELS):
            assert whole.load((number, kernel)) == f"{number} {kernel}"


def _compile(folder, number, start, misses):
    with compiled_by_one(folder):
        start.wait()

        @njit("int64(int64)", cache=True)
        def times(x):
            return x * number

        misses.put(sum(times.stats.cache_misses.values()))


def test_one_process_of_the_suite_compiles_a_kernel_and_the_others_load_it(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    context = multiprocessing.get_context("fork")
    start, misses = context.Event(), context.Queue()
    processes = [context.Process(target=_compile, args=(tmp_path, 3, start, misses)) for _ in range(2)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join()
    assert sorted(misses.get() for _ in processes) == [0, 1]


@pytest.mark.parametrize("part", ["_save_data", "_save_index"])
def test_a_process_that_ends_while_it_saves_leaves_no_others_kernel_under_its_name(tmp_path, monkeypatch, part):
    IndexDataCacheFile(str(tmp_path), "kernel", "older source").save("older", "an older kernel")
    cache = IndexDataCacheFile(str(tmp_path), "kernel", "stamp")
    with monkeypatch.context() as ending:

        def end(*_):
            raise KeyboardInterrupt

        ending.setattr(IndexDataCacheFile, part, end)
        with pytest.raises(KeyboardInterrupt):
            cache.save("kernel", "the kernel")
    assert cache.load("kernel") is None
    cache.save("kernel", "the kernel")
    cache.save("another", "another kernel")
    assert (cache.load("kernel"), cache.load("another")) == ("the kernel", "another kernel")


@pytest.mark.parametrize(
    "kernel",
    [
        lambda: token_store.kernel_for("float16", "float16"),
        lambda: weight_blocks._packer("Q8_0"),
        lambda: weight_unpack._row_reader("Q8_0"),
        lambda: list_attention.region(isa(), "float32", "float32", 2, 16, 16, 4, False, False),
    ],
)
def test_no_kernel_closes_over_a_function_which_no_other_process_would_find_in_the_cache(kernel):
    captured = [cell.cell_contents for cell in kernel().py_func.__closure__ or ()]
    assert captured
    assert not [each for each in captured if isinstance(each, Dispatcher)]


def test_a_kernel_from_before_the_package_had_its_name_is_compiled_anew(tmp_path, monkeypatch):
    cache = IndexDataCacheFile(str(tmp_path), "kernel", "stamp")
    with monkeypatch.context() as earlier:
        earlier.setattr(kernel_cache, "__package__", "cpu_ops")
        cache.save("kernel", "names the module cpu_ops.scratch")
    assert cache.load("kernel") is None
    cache.save("kernel", "names the module hetero_kv.cpu_ops.scratch")
    assert cache.load("kernel") == "names the module hetero_kv.cpu_ops.scratch"


_FAMILY = """
import sys
from numba import int64, njit
from hetero_kv.cpu_ops import code_version
from hetero_kv.cpu_ops.kernel_address import address_of

def kernel(number):
    @njit(int64(int64), cache=True)
    def times(x):
        return x * number
    return times

kernels = [kernel(int(number)) for number in sys.argv[1:]]
print(*[each(10) for each in kernels], len({address_of(each) for each in kernels}))
"""


def test_kernels_that_two_processes_have_compiled_are_told_apart_by_a_third(tmp_path):
    # Both compile one kernel alone, so that by Numba's own count both would have one name.
    program = tmp_path / "family.py"
    program.write_text(_FAMILY)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path}

    def printed(*numbers):
        done = subprocess.run(
            [sys.executable, str(program), *numbers], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert [printed("2"), printed("3")] == [["20", "1"], ["30", "1"]]
    assert printed("2", "3") == ["20", "30", "2"]
