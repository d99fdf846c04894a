"""The command `hetero-kv serve --cluster` of a tiny model, in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]


@dataclass
class Cluster:
    """A running cluster.

    Attributes:
        lines: what it has written so far.
    """

    process: subprocess.Popen
    lines: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """ "http://127.0.0.1:…"; "" before it is ready."""
        found = re.search(r"API: (http://\S+)/v1", "".join(self.lines))
        return found[1] if found else ""

    @property
    def replicas(self) -> list[psutil.Process]:
        """The processes of its engines, the oldest first."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if ":engines" in each.cmdline()[0] and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
            except (psutil.Error, IndexError):
                continue
        return sorted(found, key=lambda each: each.create_time())


@contextmanager
def cluster_of(model: Path, *flags: str) -> Iterator[Cluster]:
    """A cluster that answers with this model."""
    command = [
        sys.executable, "-m", "hetero_kv", "serve", "--cluster", "--model", str(model), "--config", "dense",
        "--port", "0", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )
    cluster = Cluster(process)

    def read() -> None:
        cluster.lines.extend(process.stdout)

    threading.Thread(target=read, daemon=True).start()
    family = []
    try:
        waited_for(lambda: cluster.address or process.poll() is not None, 180)
        assert cluster.address, "".join(cluster.lines)
        family = psutil.Process(process.pid).children(recursive=True)
        yield cluster
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, "".join(cluster.lines[-40:])
        family = [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        assert family == []
    finally:
        for each in family:
            if each.is_running():
                each.kill()
        process.kill()
        process.wait()


def waited_for(condition: Callable[[], object], seconds: float = 60) -> object:
    """What the condition returns, once that is true. Raises AssertionError if that takes longer."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, condition
        time.sleep(0.1)
    return found
