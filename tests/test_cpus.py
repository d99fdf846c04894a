"""The number of usable CPUs, affinity within the CPU quotas of cgroups v1 and v2, and of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv import cpus
from hetero_kv.settings.engine_settings import EngineSettings
from tests.support.cgroup_trees import ControlGroups

CPU_GROUPS = Path("/sys/fs/cgroup/cpu")


@pytest.fixture
def groups(tmp_path):
    return ControlGroups(tmp_path)


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)


def test_a_quota_of_version_2_counts_in_whole_cpus(groups):
    groups.mounted("0::/app\n", "cgroup2", "rw")
    groups.write("app", cpu__max="350000 100000")
    assert cpus.cpu_quota(groups.process) == 3.5
    assert cpus.usable_cpus(groups.process) == 3


def test_a_quota_of_version_1_counts_in_whole_cpus(groups):
    groups.mounted("4:cpu,cpuacct:/jobs/one\n0::/\n", "cgroup", "rw,cpu,cpuacct")
    groups.write("jobs/one", cpu__cfs_quota_us=100_000, cpu__cfs_period_us=50_000)
    groups.write("", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert cpus.usable_cpus(groups.process) == 2


@pytest.mark.parametrize("quota", ["20000 100000", "99999 100000", "1000 1000000"])
def test_below_one_cpu_there_is_one_thread(groups, quota):
    groups.mounted("0::/app\n", "cgroup2", "rw")
    groups.write("app", cpu__max=quota)
    assert cpus.usable_cpus(groups.process) == 1


@pytest.mark.parametrize("content", ["max 100000", "max", "", "-1", "none 5", "0 100000"])
def test_invalid_quotas_bound_nothing(groups, content):
    groups.mounted("0::/app\n", "cgroup2", "rw")
    groups.write("app", cpu__max=content)
    assert cpus.cpu_quota(groups.process) is None
    assert cpus.usable_cpus(groups.process) == 8


def test_a_quota_without_a_period_is_of_a_tenth_of_a_second(groups):
    groups.mounted("0::/app\n", "cgroup2", "rw")
    groups.write("app", cpu__max="200000")
    assert cpus.cpu_quota(groups.process) == 2


def test_a_container_that_sees_only_its_own_group_is_bounded_by_it(groups):
    groups.mounted("4:cpu:/docker/abc\n", "cgroup", "rw,cpu", root="/docker/abc")
    groups.write("", cpu__cfs_quota_us=250_000, cpu__cfs_period_us=100_000)
    assert cpus.cpu_quota(groups.process) == 2.5


def test_the_memory_controllers_groups_say_nothing_of_cpus(groups):
    groups.mounted("4:memory:/app\n", "cgroup", "rw,memory")
    groups.write("app", cpu__cfs_quota_us=100_000, cpu__cfs_period_us=100_000)
    assert cpus.cpu_quota(groups.process) is None


def test_without_control_groups_there_is_no_quota():
    assert cpus.cpu_quota(Path("/nowhere")) is None


@given(quotas=st.lists(st.none() | st.integers(1, 10**7), min_size=1, max_size=4), period=st.integers(1000, 10**6))
def test_of_nested_groups_the_tightest_counts_and_never_more_than_the_affinity(tmp_path_factory, quotas, period):
    groups = ControlGroups(tmp_path_factory.mktemp("groups"))
    names = [f"group{index}" for index in range(len(quotas))]
    groups.mounted(f"0::/{'/'.join(names)}\n", "cgroup2", "rw")
    for depth, quota in enumerate(quotas, start=1):
        groups.write("/".join(names[:depth]), cpu__max=f"{'max' if quota is None else quota} {period}")
    least = min((quota / period for quota in quotas if quota is not None), default=None)
    assert cpus.cpu_quota(groups.process) == least
    assert cpus.usable_cpus(groups.process) == (8 if least is None else max(1, min(8, int(least))))


@pytest.fixture
def half_a_cpu():
    """A real control group with half a CPU."""
    group = CPU_GROUPS / f"hetero-kv-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("this process may make no control groups of version 1")
    (group / "cpu.cfs_quota_us").write_text("50000")
    yield group
    group.rmdir()


LIBRARY = "import hetero_kv, torch, numba; print(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)"
TORCH_FIRST = "import torch, hetero_kv; print(torch.get_num_threads())"


@pytest.mark.parametrize(
    ("program", "threads", "found"),
    [
        (LIBRARY, {}, "1 1"),
        pytest.param(LIBRARY, {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}, "2 2", marks=pytest.mark.slow),
        # How many threads it has is torch's matter there.
        pytest.param(TORCH_FIRST, {}, "1", marks=pytest.mark.slow),
    ],
)
def test_a_process_in_a_group_starts_no_more_threads_than_its_quota(half_a_cpu, program, threads, found):
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    done = subprocess.run(
        ["sh", "-c", f"echo $$ > {half_a_cpu}/cgroup.procs; exec {sys.executable} -c '{program}'"],
        env=environment | threads, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == found


def test_threads_are_the_physical_cores_and_never_more_than_the_affinity(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 4)
    monkeypatch.setattr("hetero_kv.cpus.cpu_quota", lambda process: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert EngineSettings().resolved_threads() == 4
    assert EngineSettings(threads_num=5).resolved_threads() == 5
    assert EngineSettings(threads_num=64).resolved_threads() == 6
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3}, raising=False)
    assert EngineSettings().resolved_threads() == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None)
    assert EngineSettings().resolved_threads() == 6


def test_threads_are_no_more_than_a_containers_quota_unless_the_environment_says_how_many(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 4)
    monkeypatch.setattr("hetero_kv.cpus.cpu_quota", lambda process: 2.5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert EngineSettings().resolved_threads() == 2
    assert EngineSettings(threads_num=5).resolved_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert EngineSettings().resolved_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert EngineSettings().resolved_threads() == 2
