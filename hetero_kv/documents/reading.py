"""Reads the texts that go before a question, from files of several formats, up to the most that a model could use."""

from __future__ import annotations

import glob
import io
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hetero_kv.documents.formats import HTML, Format, format_of, text_in
from hetero_kv.errors import ConfigError
from hetero_kv.text_decoding import binary, decoded, is_wide

# 64 Mi tokens of four bytes each, as English has: more than any model's context.
MOST_BYTES = 4 * 2**26
#: The most files that one pattern may match.
MOST_FILES = 1000
_BYTES_AT_ONCE = 2**20


@dataclass(frozen=True)
class Document:
    """A text that goes before a question; `name` is its file's name without folders."""

    name: str
    text: str

    @property
    def characters(self) -> int:
        """The text's length without white space at its ends."""
        return len(self.text.strip())


def document_in(path: Path, what: str = "") -> Document:
    """The text of a file: plain text, or the text of a PDF, DOCX or HTML file.

    Args:
        path: the file; `-` is standard input.
        what: the source of the path, for errors.

    Raises:
        ConfigError: a file that cannot be read, is empty, endless, damaged or of another format, or whose format needs
            a library that is not installed.
    """
    if str(path) == "-":
        name = f"{what} -: standard input".lstrip()
        content, kind = (b"", None) if sys.stdin is None else _read(sys.stdin.buffer, name, "")
    else:
        name = f"{what} {str(path)!r}".lstrip()
        try:
            with path.expanduser().open("rb") as file:
                _require_length(os.fstat(file.fileno()).st_size, name)
                content, kind = _read(file, name, path.suffix)
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}; give a text file") from error
    return Document("standard input" if str(path) == "-" else path.name, _text_of(content, kind, name))


def document_from(content: bytes, filename: str) -> Document:
    """The text of a file's content, as `document_in`; the filename's suffix tells HTML from plain text.

    Raises ConfigError as `document_in`.
    """
    name = repr(filename)
    content, kind = _read(io.BytesIO(content), name, Path(filename).suffix)
    return Document(Path(filename).name, _text_of(content, kind, name))


def _text_of(content: bytes, kind: Format | None, name: str) -> str:
    """The text in a document; ConfigError if there is none."""
    if kind is HTML and is_wide(content):
        content = decoded(content, name).encode()
    text = _plain(content, name) if kind is None else text_in(content, kind, name, MOST_BYTES)
    if not text.strip():
        hint = f"; {kind.without_text}" if kind is not None and kind.without_text else "; give a file with text"
        raise ConfigError(f"{name} is empty{hint}")
    return text


def documents_at(words: str) -> tuple[Document, ...]:
    """The documents that `/file` names: one existing path, or several quoted like in a shell, patterns among them.

    Raises ConfigError like `document_in`, and if a file does not exist or a pattern matches too many.
    """
    if Path(words).expanduser().exists():
        return (document_in(Path(words)),)
    try:
        names = shlex.split(words)
    except ValueError:  # an unclosed quotation mark is part of a name
        names = [words]
    return tuple(document_in(path) for name in names for path in _matching(name))


def _matching(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.exists() or not glob.has_magic(name):
        return [path]
    found = sorted(each for each in map(Path, glob.iglob(str(path), recursive=True)) if each.is_file())
    if not found:
        raise ConfigError(f"no file matches {name!r}; check the pattern")
    if len(found) > MOST_FILES:
        raise ConfigError(
            f"{name!r} matches {len(found):,} files, and the limit is {MOST_FILES:,}; give a narrower pattern"
        )
    return found


def piped_text() -> str:
    """The text piped into the program; "" if standard input is a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    content, kind = _read(sys.stdin.buffer, "standard input", "")
    if kind is not None:
        raise ConfigError(f"standard input is {kind.name}, not a question; give it as a document: --prompt_file -")
    return _plain(content, "standard input")


def _read(file: BinaryIO, name: str, suffix: str) -> tuple[bytes, Format | None]:
    """The content of a file, pipe or device, bounded by `MOST_BYTES`, and its format."""
    content = bytearray()
    kind = None
    while piece := file.read(_BYTES_AT_ONCE):
        kind = kind if content else format_of(piece, suffix)
        if kind is None and not is_wide(bytes(content[:4]) or piece):
            _require_no_zero(piece, len(content), name)
        content += piece
        _require_length(len(content), name)
    return bytes(content), kind


def _require_length(size: int, name: str) -> None:
    if size > MOST_BYTES:
        raise ConfigError(
            f"{name} has more than {MOST_BYTES:,} bytes, which exceeds any model's context; give a shorter text"
        )


def _require_no_zero(content: bytes, before: int, name: str) -> None:
    if 0 in content:
        raise ConfigError(binary(content, before + content.index(0), name))


def _plain(content: bytes, name: str) -> str:
    """The bytes as text, with Unix line ends."""
    return decoded(content, name).replace("\r\n", "\n")
