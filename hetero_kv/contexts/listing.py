"""Formats contexts as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from hetero_kv.contexts.index import StoredContext
from hetero_kv.printing import printable


def contexts_table(stored: Iterable[StoredContext]) -> Table:
    """A table with a row per context: name, tokens, size of its own file, time of last use, model."""
    table = Table("name", "tokens", "own MB", "last used", "model", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:3]:
        column.justify = "right"
    for each in stored:
        name = Text(printable(each.name)) if each.name else Text(each.file[:8], style="dim")
        table.add_row(
            name, f"{each.tokens:,}", f"{each.bytes / 1e6:,.1f}", _date(each.used), Text(printable(each.model))
        )
    return table


def in_words(name: str, value: Any) -> str:
    """A value of `as_json` or `ContextStore.details` as readable text."""
    if name in ("created", "used"):
        return _date(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _date(seconds: float) -> str:
    """Local date and time."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def as_json(stored: StoredContext) -> dict[str, Any]:
    """A context's index entry; times are seconds since 1970, `bytes` is the size of its own file."""
    return {
        "name": stored.name,
        "file": stored.file,
        "model": stored.model,
        "tokens": stored.tokens,
        "bytes": stored.bytes,
        "created": stored.created,
        "used": stored.used,
    }
