"""Embeds foreign texts in a Markdown page: none can break a table, or become a link or HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hetero_kv.printing import printable

# Characters that begin HTML, code or a cell, and the bracket that would end a link's or an image's text.
_SIGNS = re.compile(r"[&<>|`\\]|\](?=[(\[:])")


def plain(text: object) -> str:
    """A text on one line that Markdown shows literally, without terminal control characters."""
    # Every dialect reads character references alike, in tables too; `\\|` is read in several ways.
    return _SIGNS.sub(lambda found: f"&#{ord(found[0])};", _one_line(text))


def code(text: object) -> str:
    """A text on one line as code, whatever backticks it contains."""
    shown = _one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{space}{shown}{space}{fence}"


def table(heading: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table whose cells show these texts; a line break in a text is a line break in the cell."""

    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join('<br>'.join(map(plain, str(cell).splitlines())) for cell in cells)} |"

    ruler = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join((line(heading), line(ruler), *map(line, rows)))


def _one_line(text: object) -> str:
    return " ".join(printable(str(text)).split())
