"""A discrete-event simulation of 100 replicas behind four kinds of routers, one of them ours.

    python -m benchmarks.cluster_simulation [--router NAME …] [--per_s 8] [--conversations 1000000] [--shared_store]
    python -m benchmarks.cluster_simulation --trace [--router NAME …] [--keeps_turns] [--shared 1.25]
    python -m benchmarks.cluster_simulation --recorded docs/cluster_simulation.png

A run of a million conversations takes one core some minutes. Every line that is printed is a row of the record
`cluster_simulation`; `--recorded` measures nothing and plots that record. What is assumed stands in `Scenario` and
`Costs` (`benchmarks/simulated_cluster/`) and in docs/cluster_simulation.md. Needs simpy; `--trace` does not: that
replays what `benchmarks.cluster` sends to two real replicas, and takes a second.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from benchmarks.figures import Label, label_decades, label_lines, new_figure, save
from benchmarks.measured_cluster.trace import RECORDED, read
from benchmarks.report import load
from benchmarks.simulated_cluster.routers import ROUTERS
from benchmarks.simulated_cluster.simulation import Outcome, Scenario, Simulation
from benchmarks.simulated_cluster.stepping_replica import StepCosts
from benchmarks.simulated_cluster.traced import TraceSimulation

COLUMNS = (
    "conversations per second", "router", "tokens from memory", "first token, median", "99th percentile",
    "whole answer, median", "largest load / mean", "mean load", "prefills per document", "sent again",
)  # fmt: skip


def row(scenario: Scenario, outcome: Outcome) -> list[str]:
    """A run's row of the record. Times and hits are those of the later half, when memory has filled."""
    later = slice(scenario.conversations // 2, None)
    first, total = outcome.first_token_s[later], outcome.total_s[later]
    hits = outcome.hits[later].sum() / outcome.tokens[later].sum()
    seconds = scenario.conversations / scenario.per_s
    return [
        f"{scenario.per_s:g}",
        scenario.router + (", with a shared store" if scenario.shared_store else ""),
        f"{hits:.1%}".replace("%", " %"),
        f"{np.median(first):.2f} s",
        f"{np.quantile(first, 0.99):.1f} s",
        f"{np.median(total):.1f} s",
        f"{outcome.balance:.2f}",
        f"{outcome.loads.mean() / seconds:.2f}",
        f"{outcome.prefills_per_document:.2f}",
        f"{outcome.sent_again:,}",
    ]


def plot(path: Path) -> None:
    """Seconds to the first token by load, the median and the 99th percentile, from the record."""
    entry = next(each for each in load("cluster_simulation").measurements if each.title == "By load")
    figure, axes = new_figure()
    labels = []
    for number, router in enumerate(dict.fromkeys(cells[1] for cells in entry.rows)):
        own = [cells for cells in entry.rows if cells[1] == router]
        loads = [float(cells[0]) for cells in own]
        for place, style in ((3, "-"), (4, ":")):
            seconds = [float(cells[place].split()[0].replace(",", "")) for cells in own]
            axes.plot(loads, seconds, style, marker="o", markersize=4, color=f"C{number}")
            if style == "-":
                labels.append(Label(router, loads[-1], seconds[-1], f"C{number}"))
    axes.set_yscale("log")
    axes.set_xlabel("conversations per second, 100 replicas")
    axes.set_ylabel("seconds to the first token")
    axes.set_xticks(loads)
    # Room for the names at the right.
    axes.set_xlim(loads[0] - 1, 1.6 * loads[-1])
    label_decades(axes.yaxis, lambda value: f"{value:g}")
    axes.set_title("Simulated time to the first token: median, and 99th percentile (dotted)", fontsize=10)
    label_lines(figure, axes, labels)
    save(figure, axes, path)


def main() -> None:
    """Simulate, or plot what was simulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--per_s", nargs="+", type=float, default=[8.0], help="conversations that begin in a second")
    parser.add_argument("--conversations", type=int, default=1_000_000)
    parser.add_argument("--shared_store", action="store_true", help="documents are fetched that were computed once")
    parser.add_argument("--trace", action="store_true", help="two replicas, and the trace of benchmarks.cluster")
    parser.add_argument("--keeps_turns", action="store_true", help="for --trace: each turn of a conversation is kept")
    parser.add_argument(
        "--shared", type=float, default=StepCosts().shared,
        help="for --trace: how many times as long all takes as on cores that nothing else uses",
    )  # fmt: skip
    parser.add_argument("--recorded", type=Path, metavar="PNG", help="plot the record, and simulate nothing")
    flags = parser.parse_args()
    if flags.recorded is not None:
        plot(flags.recorded)
        return
    if flags.trace:
        for router in flags.router:
            costs = StepCosts(shared=flags.shared)
            simulated = TraceSimulation(read(RECORDED), router, costs=costs, keeps_turns=flags.keeps_turns).run()
            print(json.dumps(simulated.row(router), ensure_ascii=False), flush=True)
        return
    for router in flags.router:
        for per_s in flags.per_s:
            scenario = Scenario(router, per_s, flags.conversations, shared_store=flags.shared_store)
            print(json.dumps(row(scenario, Simulation(scenario).run()), ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
