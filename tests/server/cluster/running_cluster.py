"""A cluster with a tiny model in processes of its own, by `hetero-kv serve --cluster` or by Ray's `serve run`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import yaml

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
    """A cluster that answers with this model, in float32 on every CPU: answers are compared token by token."""
    command = [
        sys.executable, "-m", "hetero_kv", "serve", "--cluster", "--model", str(model), "--config", "dense",
        "--dtype", "float32", "--port", "0", *flags,
    ]  # fmt: skip
    with _running(command, signal.SIGTERM, {}) as cluster:
        waited_for(lambda: cluster.address or cluster.process.poll() is not None, 180)
        assert cluster.address, "".join(cluster.lines)
        yield cluster


@contextmanager
def served_by_ray(configuration: Mapping[str, Any], folder: Path, **environment: str) -> Iterator[Cluster]:
    """A cluster by Ray's command `serve run` with a configuration file, which goes into the folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = folder / "cluster.yaml"
    options = {"host": "127.0.0.1", "port": port}
    file.write_text(yaml.safe_dump({**configuration, "http_options": options}), encoding="utf-8")
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(file)]
    # What it says of it belongs to `hetero-kv serve`.
    with _running(command, signal.SIGINT, environment) as cluster:
        cluster.lines.append(f"API: http://127.0.0.1:{port}/v1\n")

        def is_healthy() -> bool:
            assert cluster.process.poll() is None, "".join(cluster.lines)
            try:
                return httpx.get(f"{cluster.address}/health", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        waited_for(is_healthy, 180)
        yield cluster


@contextmanager
def _running(command: Sequence[str], ends_by: int, further: Mapping[str, str]) -> Iterator[Cluster]:
    """The command until the caller leaves; then nothing of it may be left."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", **further
    }  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )
    cluster = Cluster(process)

    def read() -> None:
        cluster.lines.extend(process.stdout)

    threading.Thread(target=read, daemon=True).start()
    family = []
    try:
        try:
            yield cluster
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(ends_by)
        assert process.wait(120) == 0, "".join(cluster.lines[-40:])
        family = psutil.wait_procs(family, 10)[1]
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
