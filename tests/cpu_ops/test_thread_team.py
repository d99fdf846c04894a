"""Regions on all threads: each part once, also after sleeping, failing and forking, and on OpenMP's threads."""

import os
import subprocess
import sys
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from numba import njit, types

from hetero_kv.cpu_ops import thread_team
from hetero_kv.cpu_ops.kernel_address import address_of
from hetero_kv.cpu_ops.parallel_region import (
    REGION,
    _caller,
    arguments_at,
    call_region,
    openmp_threads,
    region_arguments,
)
from hetero_kv.cpu_ops.threads import one_kernel_at_a_time

pytestmark = pytest.mark.skipif(not thread_team.is_supported(), reason="this system has no team")


@region_arguments("count parts")
def _counted(_):
    return types.Array(types.int64, 2, "C"), types.int64


@njit(REGION, nogil=True)
def count_parts(thread, threads, arguments):
    """Add 1 to counts[thread, 0], and do some work whose result goes to counts[thread, 1]; part `fails` fails."""
    counts, fails = arguments_at("count parts", "", arguments)
    if thread == fails:
        raise ValueError("this part fails")
    counts[thread, 0] += 1
    total = 0
    for i in range(1_000_000 if fails == -2 and thread else 10):
        total += i ^ thread
    counts[thread, 1] = total
    return np.int64(0)


def run(counts, threads, fails=-1):
    with one_kernel_at_a_time:
        call_region("count parts", "", address_of(count_parts), (counts, fails), threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_part_runs_once_on_any_number_of_threads(threads):
    counts = np.zeros((8, 2), np.int64)
    for _ in range(1000):
        run(counts, threads)
    np.testing.assert_array_equal(counts[:, 0], [1000] * threads + [0] * (8 - threads))
    assert counts[threads - 1, 1] == sum(i ^ (threads - 1) for i in range(10))


def test_workers_that_sleep_are_woken():
    counts = np.zeros((8, 2), np.int64)
    for _ in range(20):
        # Longer than any thread spins.
        time.sleep(50e-6 * thread_team.MOST_SPINNING / 20)
        run(counts, 2)
    np.testing.assert_array_equal(counts[:2, 0], 20)


def test_a_caller_sleeps_until_slow_workers_are_done():
    counts = np.zeros((8, 2), np.int64)
    block = thread_team._Block()
    spins = block[thread_team._SPINS]
    block[thread_team._SPINS] = 1
    for _ in range(20):
        run(counts, 2, fails=-2)
    assert block[thread_team._REMAINING] == 0
    np.testing.assert_array_equal(counts[:2, 0], 20)
    assert counts[1, 1] == sum(i ^ 1 for i in range(1_000_000))
    block[thread_team._SPINS] = spins


def test_callers_that_take_no_turns_do_not_disturb_each_other():
    address = address_of(count_parts)

    def calls(counts):
        for _ in range(2000):
            call_region("count parts", "", address, (counts, -1), 2)

    several = [np.zeros((8, 2), np.int64) for _ in range(4)]
    threads = [threading.Thread(target=calls, args=(counts,)) for counts in several]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert [counts[:2, 0].tolist() for counts in several] == [[2000, 2000]] * 4
    assert thread_team._Block()[thread_team._CALLERS] == 0


@pytest.mark.parametrize("thread", [0, 1, 3])
def test_a_part_that_fails_is_an_error_once_all_have_ended(thread):
    counts = np.zeros((8, 2), np.int64)
    with pytest.raises(RuntimeError, match="a thread of a kernel failed"):
        run(counts, 4, fails=thread)
    np.testing.assert_array_equal(counts[:4, 0], [each != thread for each in range(4)])
    run(counts, 4)
    np.testing.assert_array_equal(counts[:4, 0], [1 + (each != thread) for each in range(4)])


def test_a_start_that_failed_goes_on_where_it_stopped(monkeypatch):
    started, left = [], [1, 5]

    class Thread:
        def __init__(self, args, **_):
            self.worker = args[1]

        def start(self):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
            started.append(self.worker)

    class Block(defaultdict):
        address = 0

    block = Block(int)
    monkeypatch.setattr(thread_team.threading, "Thread", Thread)
    monkeypatch.setattr(thread_team.numba.config, "NUMBA_NUM_THREADS", 4)
    with pytest.raises(RuntimeError, match="can't start"):
        thread_team._start(block)
    assert block[thread_team._WORKERS] == 1
    del left[0]
    thread_team._start(block)
    assert started == [0, 1, 2]
    assert block[thread_team._WORKERS] == 3


FORKED = """
import os, sys
from tests.cpu_ops.test_thread_team import run, np, thread_team
counts = np.zeros((8, 2), np.int64)
run(counts, 2)
child = os.fork()
for _ in range(100):
    run(counts, 2)
assert counts[:2, 0].tolist() == [101, 101], counts
assert thread_team._Block()[thread_team._WORKERS] >= 1
if child == 0:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU has no workers")
def test_a_forked_process_has_a_team_of_its_own_and_both_end():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_threads_of_openmp_run_the_same_regions():
    counts = np.zeros((8, 2), np.int64)
    with one_kernel_at_a_time:
        _caller("count parts", "")(openmp_threads(), address_of(count_parts), (counts, -1), 3)
    np.testing.assert_array_equal(counts[:, 0], [1, 1, 1, 0, 0, 0, 0, 0])
