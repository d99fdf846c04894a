"""Extracts the text of a document; a program that `hetero_kv.documents.formats` runs in a separate process.

    python format_reader.py FORMAT SECONDS MEMORY MOST_BYTES < document > text

A library's exception is one line on standard error, and the exit status 1. The system limits time and memory, so that
no document can evade the limits; no file can be written. The program imports nothing of this package: it starts
quickly, and exposes little code.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import resource
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

#: The most bytes that a DOCX may unpack to, by its own header; no more than the header says is ever unpacked.
_MOST_UNPACKED = 1 << 30
#: The deepest nesting of a page's elements; lists of old pages, whose items are not closed, are some hundreds deep.
_DEEPEST = 1000


class RefusedDocument(Exception):
    """A document that is refused, with the reason."""


def pdf_text(content: bytes) -> Iterator[str]:
    """The text of each page."""
    import pypdf

    reader = pypdf.PdfReader(io.BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        raise RefusedDocument("it is encrypted with a password")
    for page in reader.pages:
        yield page.extract_text().strip() + "\n\n"


def docx_text(content: bytes) -> Iterator[str]:
    """Paragraphs, headings and list items as Markdown, and rows of tables; no headers and footnotes."""
    import docx
    from docx.table import Table

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if "word/document.xml" not in archive.namelist():
            raise RefusedDocument("it is another zip archive")
        if sum(member.file_size for member in archive.infolist()) > _MOST_UNPACKED:
            raise RefusedDocument(f"it unpacks to more than {_MOST_UNPACKED:,} bytes")
    for part in docx.Document(io.BytesIO(content)).iter_inner_content():
        if isinstance(part, Table):
            for row in part.rows:
                yield "| " + " | ".join(" ".join(cell.text.split()) for cell in row.cells) + " |\n"
            yield "\n"
            continue
        style = part.style.name if part.style is not None else ""
        heading = re.fullmatch(r"Heading (\d)", style)
        mark = "#" * int(heading[1]) + " " if heading else "- " if style.startswith("List") else ""
        if part.text.strip():
            yield f"{mark}{part.text}\n" + ("" if mark == "- " else "\n")


def html_text(content: bytes) -> Iterator[str]:
    """The page as Markdown, without scripts, styles and pictures."""
    import bs4
    import markdownify

    class Soup(bs4.BeautifulSoup):
        """A page whose elements are not nested without end: a tag takes as long as there are open ones."""

        def pushTag(self, tag: bs4.Tag) -> None:
            if len(self.tagStack) > _DEEPEST:
                raise RefusedDocument(f"its elements are nested more than {_DEEPEST:,} deep")
            super().pushTag(tag)

    # Elements are written inside each other.
    sys.setrecursionlimit(10 * _DEEPEST)
    soup = Soup(content, "html.parser")
    for element in soup(["script", "style", "template", "noscript", "svg", "img", "iframe"]):
        element.decompose()
    written = markdownify.MarkdownConverter(heading_style="ATX", escape_asterisks=False, escape_underscores=False)
    text = written.convert_soup(soup)
    yield re.sub(r"\n{3,}", "\n\n", text)


READERS = {"PDF": pdf_text, "DOCX": docx_text, "HTML": html_text}


def limit(seconds: int, room: int) -> None:
    """Limit the process from now on: CPU seconds, `room` bytes more than it uses now, and no file writes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    for kind, most in (
        (resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 1),
        (resource.RLIMIT_AS, _bytes_in_use() + room),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hardest = resource.getrlimit(kind)[1]
        # Some systems refuse to limit memory; the limits of time and length still apply.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hardest == resource.RLIM_INFINITY else min(most, hardest), hardest))


def _bytes_in_use() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 256 << 20


def _written(name: str, content: bytes, most_bytes: int) -> None:
    size = 0
    for piece in READERS[name](content):
        encoded = piece.encode(errors="replace")
        size += len(encoded)
        if size > most_bytes:
            raise RefusedDocument(f"its text has more than {most_bytes:,} bytes")
        sys.stdout.buffer.write(encoded)
    sys.stdout.buffer.flush()


def main() -> int:
    """Read a document, and write its text; returns the exit status."""
    name, seconds, memory, most_bytes = sys.argv[1], *map(int, sys.argv[2:])
    logging.disable()
    content = sys.stdin.buffer.read()
    limit(seconds, memory)
    try:
        _written(name, content, most_bytes)
    except MemoryError:
        print(f"it takes more than {memory / 1e6:,.0f} MB", file=sys.stderr)
    except RefusedDocument as error:
        print(error, file=sys.stderr)
    except Exception as error:  # libraries raise anything
        print(f"{type(error).__name__}: {error}".partition("\n")[0][:300], file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
