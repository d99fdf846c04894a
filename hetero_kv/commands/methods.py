"""The command `methods`: prints everything that rules can name, one line each."""

from __future__ import annotations

import argparse

from rich.markup import escape
from rich.table import Table

from hetero_kv.printing import console, json_text
from hetero_kv.rules.registered import registered
from hetero_kv.settings.flags import FlagParser


def add_flags(parser: FlagParser) -> None:
    """Add the command's flags to `parser`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(flags: argparse.Namespace) -> int:
    """Print the names with their meanings; returns the exit status."""
    kinds = registered()
    if flags.json:
        print(json_text({kind: {entry.name: entry.meaning for entry in kinds[kind]} for kind in kinds}))
        return 0
    terminal = console()
    width = max(len(entry.name) for entries in kinds.values() for entry in entries)
    for kind, entries in kinds.items():
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=width)
        table.add_column()
        for entry in entries:
            table.add_row(f"  {escape(entry.name)}", escape(entry.meaning))
        terminal.print(f"[bold]{kind}[/bold]", highlight=False)
        terminal.print(table)
    return 0
