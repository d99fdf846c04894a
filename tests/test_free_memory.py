"""The memory that this process may still take: machine, cgroups v1 and v2, address space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hetero_kv.planning import free_memory
from tests.support.cgroup_trees import ControlGroups

GB = 10**9


@pytest.fixture
def groups(tmp_path):
    return ControlGroups(tmp_path)


def tightest(groups) -> int | None:
    return min((limit.free for limit in free_memory._group_limits(groups.process)), default=None)


def test_a_group_of_version_2_bounds_what_is_free(groups):
    groups.mounted("0::/app\n", "cgroup2", "rw")
    groups.write("app", memory__max=8 * GB, memory__current=3 * GB)
    assert tightest(groups) == 5 * GB


def test_the_groups_around_a_group_bound_it_too(groups):
    groups.mounted("0::/slice/service/app\n", "cgroup2", "rw")
    groups.write("slice", memory__max=4 * GB, memory__current=3 * GB)
    groups.write("slice/service", memory__max="max", memory__current=3 * GB)
    groups.write("slice/service/app", memory__max=8 * GB, memory__current=2 * GB)
    assert tightest(groups) == 1 * GB


def test_memory_high_limits_a_groups_memory(groups):
    groups.mounted("0::/app\n", "cgroup2", "rw")
    groups.write("app", memory__max=8 * GB, memory__high=4 * GB, memory__current=3 * GB)
    assert tightest(groups) == 1 * GB


def test_file_pages_that_nobody_uses_count_as_free(groups):
    groups.mounted("0::/app\n", "cgroup2", "rw")
    groups.write("app", memory__max=8 * GB, memory__current=7 * GB, memory__stat=f"anon 5\ninactive_file {4 * GB}")
    assert tightest(groups) == 5 * GB


def test_a_group_of_version_1_bounds_what_is_free(groups):
    groups.mounted("4:cpu,memory:/jobs/one\n0::/\n", "cgroup", "rw,memory")
    groups.write("jobs/one", memory__limit_in_bytes=6 * GB, memory__usage_in_bytes=2 * GB)
    groups.write("", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=9 * GB)
    assert tightest(groups) == 4 * GB


def test_a_container_that_sees_only_its_own_group_is_bounded_by_it(groups):
    groups.mounted("4:memory:/docker/abc\n", "cgroup", "rw,memory", root="/docker/abc")
    groups.write("", memory__limit_in_bytes=2 * GB, memory__usage_in_bytes=GB)
    assert tightest(groups) == GB


def test_without_a_limit_groups_bound_nothing(groups):
    groups.mounted("0::/app\n", "cgroup2", "rw")
    groups.write("app", memory__max="max", memory__high="max", memory__current=GB)
    assert tightest(groups) is None
    assert list(free_memory._group_limits(Path("/nowhere"))) == []


def test_a_group_above_its_limit_has_nothing_free(groups):
    groups.mounted("0::/app\n", "cgroup2", "rw")
    groups.write("app", memory__max=GB, memory__current=2 * GB)
    assert tightest(groups) == 0


def test_the_machine_is_never_promised_more_than_it_has():
    assert 0 < free_memory.free_dram() <= psutil.virtual_memory().total


def test_the_tightest_bound_wins(monkeypatch):
    bound = free_memory.Limit("control group /app", 5)
    monkeypatch.setattr(free_memory, "_group_limits", lambda: [bound])
    assert free_memory.dram_limits()[0] == bound
    assert free_memory.free_dram() == 5


@pytest.mark.skipif(sys.platform == "win32", reason="no address space limit")
def test_the_limit_of_the_address_space_counts():
    program = (
        "import resource; from hetero_kv.planning.free_memory import free_dram; before = free_dram();"
        "resource.setrlimit(resource.RLIMIT_AS, (2 * 10**9, resource.RLIM_INFINITY)); print(before, free_dram())"
    )
    before, after = map(int, subprocess.check_output([sys.executable, "-c", program], text=True).split())
    assert after < 2 * 10**9
    assert after < before or before < 2 * 10**9
