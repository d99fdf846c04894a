"""`python -m tests.campaigns`: runs all campaigns at full length and prints a table of outcomes."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from tests.campaigns.campaign import FAULTS, OUTCOMES, Tally, campaigns
from tests.campaigns.runner import run


def main() -> int:
    known = campaigns()
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which campaigns: {', '.join(known)}; all where none is given")
    parser.add_argument("--times", type=float, default=100, help="times the slow tests' number of tries (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="another seed makes other tries (default: 1)")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.names} - known.keys()):
        parser.error(f"no campaign is called {', '.join(unknown)}; there are {', '.join(known)}")
    console = Console(stderr=True)
    tallies = []
    for name in arguments.names or known:
        tries = round(known[name].tries * arguments.times)
        with console.status(name) as status:
            tallies.append(
                run(
                    name,
                    tries,
                    arguments.seed,
                    lambda done, n=name, of=tries: status.update(f"{n}: {done:,} of {of:,}"),
                )
            )
    Console().print(_table(tallies))
    faults = [fault for tally in tallies for fault in tally.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _table(tallies: list[Tally]) -> Table:
    table = Table("campaign", "tries", *OUTCOMES)
    for tally in tallies:
        cells = [f"[red]{tally.counts[name]}[/]" if name in FAULTS and tally.counts[name] else f"{tally.counts[name]:,}"
                 for name in OUTCOMES]  # fmt: skip
        table.add_row(tally.name, f"{tally.counts.total():,}", *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
