"""Writes settings with their sources for the terminal: `block_size 16, kv_type FP16 [rule 2]`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rich.markup import escape

HIDDEN = "Settings that are not shown have their defaults; --all shows them."


def short(source: str, rules: str) -> str:
    """A source, e.g. "rule 2"; in a file that the rules file extends, e.g. "quest.yaml: rule 2"."""
    return source.removeprefix(f"{rules}: ").rpartition("/")[2]


def written(
    settings: Mapping[str, Any], changed: Collection[str], show_all: bool, sources: Mapping[str, str], rules: str
) -> str:
    """`name value, … [source]; …` by source, with values in bold that differ from the default."""
    by_source: dict[str, list[str]] = {}
    for name, value in settings.items():
        if show_all or name in changed:
            text = escape(f"{name} {_value(value)}")
            words = f"[bold]{text}[/bold]" if show_all and name in changed else text
            by_source.setdefault(sources[name], []).append(words)
    parts = [", ".join(words) + escape(f" [{short(source, rules)}]") for source, words in by_source.items()]
    return "; ".join(parts) or ("defaults" if settings else "")


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
