"""Environment variables for kernels and torch are set before these load."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slow_variants import with_slow

NAMES = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE"


LARGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@functools.cache
def run(code, **settings):
    """A new process, whose environment has nothing of `NAMES` but these settings, which all may look at."""
    environment = {key: value for key, value in os.environ.items() if key not in NAMES}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment | settings, check=True, capture_output=True, text=True)


def printed(code, **settings):
    return run(code, **settings).stdout.strip()


def said(code, **settings):
    return run(code, **settings).stderr.strip()


def spin_count(**settings):
    return printed("import hetero_kv.cpu_ops, os; print(os.environ.get('GOMP_SPINCOUNT'))", **settings)


def test_openmp_spins_briefly_unless_the_user_says_otherwise():
    assert spin_count() == "300"
    assert spin_count(GOMP_SPINCOUNT="7") == "7"
    assert spin_count(OMP_WAIT_POLICY="active") == "None"


# Threads besides torch's and Python's, and whether a later region has the right number of them.
# Then whether the program advised the system to use large pages for the mapping around the middle of a large tensor.
LATER = """
import os
before = len(os.listdir("/proc/self/task"))
import hetero_kv, threading, time, torch
spare = [thread for thread in threading.enumerate() if thread.name == "openmp-spare"]
for _ in range(200 if spare else 0):
    if len(os.listdir("/proc/self/task")) - before >= 1 + len(os.sched_getaffinity(0)):
        break
    time.sleep(0.05)
print(len(spare), len(os.listdir("/proc/self/task")) - before >= 1 + len(os.sched_getaffinity(0)))

place = (tensor := torch.empty(64 << 20, dtype=torch.uint8)).data_ptr() + tensor.numel() // 2
is_its = False
for line in open("/proc/self/smaps"):
    first, _, rest = line.partition("-")
    try:
        is_its = int(first, 16) <= place < int(rest.split()[0], 16)
    except (ValueError, IndexError):
        if is_its and line.startswith("VmFlags:"):
            print("hg" in line.split())
"""
IMPORTED_FIRST = f"import torch{LATER}"
USED_FIRST = f"import torch; torch.ones(3){LATER}"


def spare_threads(code, **settings):
    return printed(code, **settings).splitlines()[0]


def has_large_pages(code, **settings):
    return printed(code, **settings).splitlines()[1]


# A process imports torch in seconds: in `make test` are those that have no settings, which tests share.
THREADS = {
    "no settings": (IMPORTED_FIRST, {}, "1 True"),
    "a count": (USED_FIRST, {"GOMP_SPINCOUNT": "7", "THP_MEM_ALLOC_ENABLE": "0"}, "0 False"),
    "a policy": (IMPORTED_FIRST, {"OMP_WAIT_POLICY": "active"}, "0 False"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is of Linux's torch")
@pytest.mark.parametrize("case", with_slow(THREADS, slow=("a count", "a policy")))
def test_openmp_spins_briefly_where_torch_was_imported_first(case):
    code, settings, expected = case
    assert spare_threads(code, **settings) == expected


def test_benchmarks_run_as_their_users_do_and_peers_as_they_are_started():
    name = "GOMP_SPINCOUNT"
    code = f"import benchmarks, os; print(os.environ[{name!r}], benchmarks.GIVEN_ENVIRONMENT.get({name!r}))"
    assert printed(code) == "300 None"
    assert printed(code, GOMP_SPINCOUNT="7") == "7 7"


PAGES = {
    "no settings": (LATER, {}, "True"),
    "no large ones": (LATER, {"THP_MEM_ALLOC_ENABLE": "0"}, "False"),
    "torch first": (IMPORTED_FIRST, {}, "True"),
}


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this system has no transparent large pages"
)
@pytest.mark.parametrize("case", with_slow(PAGES, slow=["no settings", "no large ones"]))
def test_tensors_lie_in_large_pages_unless_the_user_says_otherwise(case):
    code, settings, expected = case
    assert has_large_pages(code, **settings) == expected


@pytest.mark.skipif(
    "[madvise]" not in (LARGE.read_text() if LARGE.exists() else ""), reason="large pages are not for those who ask"
)
def test_small_pages_of_a_torch_that_was_used_before_are_said():
    assert "import hetero_kv first, or set THP_MEM_ALLOC_ENABLE=1" in said(USED_FIRST)
    assert said(IMPORTED_FIRST) == ""


@pytest.mark.slow
def test_small_pages_that_the_user_has_asked_for_are_not_said():
    assert said(USED_FIRST, GOMP_SPINCOUNT="7", THP_MEM_ALLOC_ENABLE="0") == ""
