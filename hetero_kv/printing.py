"""What reaches a terminal: text that cannot command it. All that is printed passes `printable`.

Models, documents, rules and the names of files are other people's. An escape sequence in one of them could move the
cursor, rename the window or fill the clipboard; an override of writing direction could show other words than there are.
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

# C0 without tab and newline, DEL, C1, embeddings, overrides and isolates of direction; halves of surrogates, which
# stand for bytes that are no text. Marks that scripts need (joiners, LRM, RLM) stay.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|[\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without what commands a terminal; what is no character is U+FFFD."""
    return _UNPRINTABLE.sub(lambda found: "\ufffd" if found[0] >= "\ud800" else "", text)


def marked(text: str) -> str:
    """The text with U+FFFD for each character that `printable` takes out: as long as it was, for editors of lines.

    What an editor shows by signs of its own, such as ^A, stays.
    """
    return _UNPRINTABLE.sub(lambda found: "\ufffd" if found[0] > "\x9f" else found[0], text)


def json_text(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """The value as JSON that can be printed: what `printable` takes out is escaped, so that nothing is lost.

    Where standard output is not UTF-8, all that is not ASCII is.
    """
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return escaped(json.dumps(value, indent=2, ensure_ascii=not encoding.startswith("utf"), default=default))


def escaped(json_content: str) -> str:
    """The same JSON, in which what `printable` takes out is escaped: a file of it can be looked at in a terminal."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json_content)


def discard_rest(stream: TextIO) -> None:
    """Let nobody have what is still to be written: the interpreter would complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _PrintableConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def console(*, stderr: bool = False) -> Console:
    """A console of rich whose texts are printable; its own colours and cursor movements are not touched."""
    # A name may have colons, `quest:x:y=3`: what stands between them is no emoji.
    return _PrintableConsole(stderr=stderr, emoji=False)


@contextmanager
def passing_line(text: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done, gone afterwards; none where that is no terminal.

    Gives a function that changes the text.
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
    """Let warnings be printable, and characters that a terminal's encoding lacks be question marks, not errors."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
