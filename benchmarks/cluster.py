"""Two real replicas on this machine behind our router and Ray's, on one recorded trace; or what a cluster costs.

    python -m benchmarks.cluster [--router NAME …] [--store] [--model NAME] [--recipe dense] [--threads 1] [--json FILE]
    python -m benchmarks.cluster --overhead [--repeats 10] [--answer 64] [--model NAME] [--threads 1] [--json FILE]
    python -m benchmarks.cluster --draw

Routers: a cluster starts anew for each, with the router, and gets the same
conversations about documents (`benchmarks/measured_cluster/trace.json`, which `--draw` drew). Figures: prompts' tokens
that a replica had in memory, or with `--store` in a folder that both share; time to the first token; the larger
replica's CPU time over the mean; how often a document was computed.

Overhead: one machine's server and a cluster with one replica, both running, in turns: time to the first token of a
short prompt, and tokens per second of four answers at a time.

`--json` puts the table into a record in the form of `benchmarks/results/`. Needs `ray[serve]`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measured_cluster import overhead, replay
from benchmarks.measured_cluster.starting import Server, cluster, one_server
from benchmarks.measured_cluster.trace import RECORDED, drawn, read, written
from benchmarks.report import CURRENT, SUPERSEDED
from hetero_kv.evals.environment import environment

FOUR = ("ours", "PrefixCacheAffinityRouter", "power of two choices", "round robin")
"""The routers that are compared where none is named."""


def compared(names: Sequence[str], flags: argparse.Namespace, scratch: Path) -> list[list[str]]:
    """A row per router."""
    trace, rows = read(flags.trace), []
    for number, name in enumerate(names):
        store = scratch / f"contexts-{number}" if flags.store else None
        server = Server(flags.model, flags.recipe, flags.threads, context_folder=store)
        with cluster(server, 2, scratch / f"{number}.log", name) as (address, replicas):
            rows.append(replay.replayed(address, replicas, trace).row(name))
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    return rows


def beside_one_server(flags: argparse.Namespace, scratch: Path) -> list[list[str]]:
    """The rows of the cluster's overhead."""
    server = Server(flags.model, flags.recipe, flags.threads)
    with one_server(server, scratch / "server.log") as one, cluster(server, 1, scratch / "cluster.log") as (several, _):
        return overhead.rows(one, several, flags.repeats, flags.answer)


def put(path: Path, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Put a table into a record, as the current one of this title."""
    record: dict[str, Any] = {"question": "", "goal": None, "setup": "", "measurements": []}
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
    for each in record["measurements"]:
        if each["title"] == title:
            each["status"] = SUPERSEDED
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    machine = environment(None)
    words = [word for word in sys.argv[1:] if word not in ("--json", str(path))]
    measurement = {
        "status": CURRENT,
        "title": title,
        "command": f"python -m benchmarks.cluster {shlex.join(words)}".rstrip(),
        "machine": f"{machine['cpus']} virtual CPUs, {machine['processor']}",
        "commit": commit.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "columns": list(columns),
        "rows": [list(row) for row in rows],
    }
    record["measurements"].insert(0, measurement)
    path.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", nargs="+", default=list(FOUR))
    parser.add_argument("--store", action="store_true", help="replicas share a folder of contexts")
    parser.add_argument("--overhead", action="store_true", help="measure one replica beside one machine's server")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--recipe", default="dense")
    parser.add_argument("--threads", type=int, default=1, help="of an engine")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer, for --overhead")
    parser.add_argument("--trace", type=Path, default=RECORDED)
    parser.add_argument("--draw", action="store_true", help="draw the trace, and measure nothing")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    if flags.draw:
        written(drawn(), flags.trace)
        return
    columns: Sequence[str]
    with tempfile.TemporaryDirectory() as name:
        if flags.overhead:
            title, columns, rows = "Overhead", overhead.COLUMNS, beside_one_server(flags, Path(name))
        else:
            from benchmarks.measured_cluster.routers import ROUTERS

            if unknown := set(flags.router) - set(ROUTERS):
                parser.error(f"no router {', '.join(unknown)}; there are: {', '.join(ROUTERS)}")
            title = "With a shared store" if flags.store else "Without a store"
            columns, rows = replay.COLUMNS, compared(flags.router, flags, Path(name))
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if flags.json is not None:
        put(flags.json, title, columns, rows)


if __name__ == "__main__":
    main()
