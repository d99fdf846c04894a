"""A question: texts from files or a pipe, and what is asked about them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from hetero_kv.chat.options import ChatOptions
from hetero_kv.errors import ConfigError
from hetero_kv.models.turns import about

# Four bytes a token, as English has, for 64 Mi tokens: more than any model's context.
_MOST_BYTES = 4 * 2**26
_BYTES_AT_ONCE = 2**20
# Characters of a question where it is only named.
_SHORT = 60


@dataclass(frozen=True)
class Document:
    """A text that goes before a question; `name` is its file's, without folders."""

    name: str
    text: str


@dataclass(frozen=True)
class Question:
    """What is sent to the model; either part may be missing.

    Attributes:
        documents: what stands before it.
        prompt: what is asked about them.
    """

    documents: tuple[Document, ...] = ()
    prompt: str | None = None

    def with_prompt(self, prompt: str) -> Question:
        """The same documents with this question; "" for the documents alone."""
        return replace(self, prompt=prompt or None)

    @property
    def document(self) -> str | None:
        """The documents as one text, each with its name above it where there are several; None where there is none."""
        if len(self.documents) > 1:
            return "\n\n".join(f"File: {each.name}\n\n{each.text.strip()}" for each in self.documents)
        return self.documents[0].text if self.documents else None

    @property
    def text(self) -> str:
        """The documents, a blank line, the question."""
        if self.document is None or self.prompt is None:
            return (self.document or "").rstrip("\n") + (self.prompt or "")
        return about(self.document, self.prompt)

    @property
    def in_short(self) -> str:
        """The documents' names and the question's first words, on one line."""
        words = " ".join((self.prompt or "")[: 4 * _SHORT].split())
        names = ", ".join(document.name for document in self.documents)
        said = f"{words[: _SHORT - 1]}…" if len(words) > _SHORT else words
        return " · ".join(part for part in (names, said) if part)


def question_of(options: ChatOptions, *, interactive: bool) -> Question:
    """The question that the flags ask. Without a terminal and without a prompt it is read from standard input.

    Raises:
        ConfigError: a prompt file that cannot be read, is empty, endless or not text; or there is no question at all.
    """
    if options.prompt is not None and not options.prompt.strip():
        raise ConfigError("--prompt is empty; give a question")
    documents = tuple(_document(path) for path in options.prompt_file)
    question = Question(documents, options.prompt)
    if interactive or question.text:
        return question
    piped = (
        ""
        if sys.stdin is None or sys.stdin.isatty()
        else _text(_read(sys.stdin.buffer, "standard input"), "standard input")
    )
    if not piped.strip():
        raise ConfigError(
            "there is no question and no terminal to ask for one; give --prompt or --prompt_file, or pipe one in"
        )
    return Question(prompt=piped.strip())


def _document(path: Path) -> Document:
    if str(path) == "-":
        name = "--prompt_file -: standard input"
        content = b"" if sys.stdin is None else _read(sys.stdin.buffer, name)
    else:
        name = f"--prompt_file {str(path)!r}"
        try:
            with path.expanduser().open("rb") as file:
                _require_length(os.fstat(file.fileno()).st_size, name)
                content = _read(file, name)
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}; give a text file") from error
    text = _text(content, name)
    if not text.strip():
        raise ConfigError(f"{name} is empty; give a file with text in it")
    return Document("standard input" if str(path) == "-" else path.name, text)


def _read(file: BinaryIO, name: str) -> bytes:
    """All of the file, which may be a pipe or a device: no more than a model could be asked about."""
    content = bytearray()
    while piece := file.read(_BYTES_AT_ONCE):
        _require_no_zero(piece, len(content), name)
        content += piece
        _require_length(len(content), name)
    return bytes(content)


def _require_length(size: int, name: str) -> None:
    if size > _MOST_BYTES:
        raise ConfigError(
            f"{name} has more than {_MOST_BYTES:,} bytes, which is more text than any model's context holds; give a "
            "shorter text"
        )


def _require_no_zero(content: bytes, before: int, name: str) -> None:
    if 0 in content:
        place = before + content.index(0)
        raise ConfigError(f"{name} is binary (byte {place} is 0x00), not text; convert it to plain UTF-8 text")


def _text(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); convert it to plain text"
        ) from error
    return text.replace("\r\n", "\n")
