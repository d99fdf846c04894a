"""The first question: a text from a file or a pipe, and what is asked about it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_kv.chat.options import ChatOptions
from hetero_kv.errors import ConfigError


@dataclass(frozen=True)
class Question:
    """What is sent to the model first; either part may be missing.

    Attributes:
        document: the text of the prompt file.
        prompt: what is asked about it.
    """

    document: str | None = None
    prompt: str | None = None

    def with_prompt(self, prompt: str) -> Question:
        """The same document with this question; "" for the document alone."""
        return replace(self, prompt=prompt or None)

    @property
    def text(self) -> str:
        """The document, a blank line, the question."""
        return "\n\n".join(
            part for part in (self.document and self.document.rstrip("\n"), self.prompt) if part is not None
        )


def question_of(options: ChatOptions, *, interactive: bool) -> Question:
    """The question that the flags ask. Without a terminal and without a prompt it is read from standard input.

    Raises:
        ConfigError: a prompt file that cannot be read, is empty or is not text; or there is no question at all.
    """
    if options.prompt is not None and not options.prompt.strip():
        raise ConfigError("--prompt is empty; give a question")
    document = None if options.prompt_file is None else _document(options.prompt_file)
    question = Question(document, options.prompt)
    if interactive or question.text:
        return question
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _text(sys.stdin.buffer.read(), "standard input")
    if not piped.strip():
        raise ConfigError(
            "there is no question and no terminal to ask for one; give --prompt or --prompt_file, or pipe one in"
        )
    return Question(prompt=piped.strip())


def _document(path: Path) -> str:
    if str(path) == "-":
        name = "--prompt_file -: standard input"
        content = b"" if sys.stdin is None else sys.stdin.buffer.read()
    else:
        name = f"--prompt_file {str(path)!r}"
        try:
            content = path.expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}; give a text file") from error
    text = _text(content, name)
    if not text.strip():
        raise ConfigError(f"{name} is empty; give a file with text in it")
    return text


def _text(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); convert it to plain text"
        ) from error
    if "\0" in text:
        raise ConfigError(
            f"{name} is binary (byte {content.index(0)} is 0x00), not text; convert it to plain UTF-8 text"
        )
    return text.replace("\r\n", "\n")
