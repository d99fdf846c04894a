"""Makes text safe for a terminal. All printed text passes `printable`.

Models, documents, rules and file names come from others. An escape sequence in them could move the cursor, rename the
window or fill the clipboard. An override of the writing direction could show other words than the text has.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 without tab and newline, DEL, C1, embeddings, overrides and isolates of direction; surrogate halves, which stand
# for bytes that are not text. Marks that scripts need (joiners, LRM, RLM) stay.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|[\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without terminal control characters; U+FFFD replaces surrogate halves."""
    return _UNPRINTABLE.sub(lambda found: "\ufffd" if found[0] >= "\ud800" else "", text)


def marked(text: str) -> str:
    """The text with U+FFFD for each character that `printable` removes: its length stays, as line editors need it.

    Control characters that an editor shows itself, such as ^A, stay.
    """
    return _UNPRINTABLE.sub(lambda found: "\ufffd" if found[0] > "\x9f" else found[0], text)


def json_text(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """The value as printable JSON: characters that `printable` removes are escaped, so that nothing is lost.

    If standard output is not UTF-8, all non-ASCII characters are escaped.
    """
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return escaped(json.dumps(value, indent=2, ensure_ascii=not encoding.startswith("utf"), default=default))


def escaped(json_content: str) -> str:
    """The same JSON with the characters that `printable` removes escaped, so that a terminal can show the file."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json_content)


def discard_rest(stream: TextIO) -> None:
    """Send the stream's unwritten rest to /dev/null: the interpreter would fail when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _PrintableConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def console(*, stderr: bool = False) -> Console:
    """A rich console that prints printable text; its own colours and cursor movements are not touched."""
    # A name may contain colons, as `quest:x:y=3` does: disable emoji codes.
    return _PrintableConsole(stderr=stderr, emoji=False)


@contextmanager
def passing_line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on standard error while the context runs; show none if that is not a terminal.

    Yields a function that changes the text.
    """
    terminal = console(stderr=True)
    if not terminal.is_terminal:
        yield lambda text: None
        return
    with terminal.status(text) as status:
        yield status.update


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def make_printing_safe() -> None:
    """Make warnings printable, and print a question mark for characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
