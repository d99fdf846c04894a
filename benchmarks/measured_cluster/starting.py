"""Starts a cluster, and one machine's server, of the same model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.http_serving import free_port, started

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Server:
    """What is served, by one process or by several.

    Attributes:
        model, recipe: as `hetero-kv serve` takes them.
        threads: of an engine.
        max_seq_len: of a prompt and its answer, tokens.
        context_folder: where replicas save contexts; None: they do not.
    """

    model: str
    recipe: str
    threads: int
    max_seq_len: int = 2048
    context_folder: Path | None = None

    def words(self, port: int) -> list[str]:
        """The flags of `hetero-kv serve`."""
        contexts = {"context_cache": "off"} if self.context_folder is None else {"context_folder": self.context_folder}
        flags = {
            "model": self.model, "config": self.recipe, "threads_num": self.threads, "max_seq_len": self.max_seq_len,
            "dram_budget_gb": 0.5, "speculation": "off", "port": port, **contexts,
        }  # fmt: skip
        return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@contextmanager
def one_server(server: Server, log: Path) -> Iterator[str]:
    """The address of one machine's server."""
    port = free_port()
    with started(_python("-m", "hetero_kv", "serve", *server.words(port)), port, log) as address:
        yield address


@contextmanager
def cluster(
    server: Server, replicas: int, log: Path, router: str = "ours"
) -> Iterator[tuple[str, list[psutil.Process]]]:
    """The address of a cluster, and the processes of its replicas, once all of them have loaded the model.

    Args:
        router: its name in `benchmarks.measured_cluster.routers`.
    """
    port = free_port()
    # So that Ray has a core for the actor of its own router.
    words = [*server.words(port), "--cluster", "--replicas", str(replicas), "--replica_cpus", "0"]
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    with started(_python("-m", "benchmarks.measured_cluster.serving", router, *words), port, log) as address:
        while "API: " not in log.read_text(errors="replace"):
            time.sleep(0.1)
        family = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
        yield address, [each for each in family if ":engines" in "".join(each.cmdline())]


def _python(*words: str) -> Sequence[str]:
    return ["env", f"PYTHONPATH={ROOT}", "RAY_USAGE_STATS_ENABLED=0", sys.executable, *words]
