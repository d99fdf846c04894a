"""Processes that save kernels at the same moment do not take each other's for their own."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

import cpu_ops.code_version  # noqa: F401  has Numba's cache locked
from cpu_ops import attention, token_store, weight_blocks, weight_unpack

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
        lambda: attention._region("generic", "float32", "float32", 2, 16, 16, 4, False, False),
    ],
)
def test_no_kernel_closes_over_a_function_which_no_other_process_would_find_in_the_cache(kernel):
    held = [cell.cell_contents for cell in kernel().py_func.__closure__ or ()]
    assert held
    assert not [each for each in held if isinstance(each, Dispatcher)]
