"""Document formats other than plain text, and the extraction of their text.

A document may be made to attack the program that reads it. So a separate process, `format_reader.py`, reads it within
limits of time and memory; the libraries' exceptions there become this package's errors here.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hetero_kv.errors import ConfigError

#: CPU seconds per document. A page of a PDF takes some hundredths.
SECONDS = 120
#: Bytes that a library may use, in addition to the interpreter's.
MEMORY = 2 << 30
_PROGRAM = Path(__file__).with_name("format_reader.py")


@dataclass(frozen=True)
class Format:
    """A document format.

    Attributes:
        module, package: the library that reads it: its import name, and its name for pip.
        without_text: the remedy for a document without text; "" for the general one.
    """

    name: str
    module: str
    package: str
    without_text: str = ""


PDF = Format(
    "PDF", "pypdf", "pypdf", "its pages are pictures: add text with a program for optical character recognition (OCR)"
)
DOCX = Format("DOCX", "docx", "python-docx")
HTML = Format("HTML", "markdownify", "markdownify")

_HTML_SUFFIXES = (".html", ".htm", ".xhtml")


def format_of(beginning: bytes, suffix: str) -> Format | None:
    """A document's format by its first bytes and file suffix; None for plain text such as source code."""
    if b"%PDF-" in beginning[:1024]:
        return PDF
    if beginning.startswith(b"PK\x03\x04"):
        return DOCX
    # In UTF-16 and UTF-32 zeros stand between the letters.
    words = beginning[:1024].lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n").replace(b"\0", b"").lower()
    is_page = not suffix and words.startswith((b"<!doctype html", b"<html"))
    return HTML if is_page or suffix.lower() in _HTML_SUFFIXES else None


def text_in(content: bytes, kind: Format, name: str, most_bytes: int) -> str:
    """The text of a document.

    Args:
        name: the document's name in errors.
        most_bytes: the most bytes of its text in UTF-8.

    Raises:
        ConfigError: it is damaged, encrypted, or exceeds the limits of time, memory or text; or the library is not
            installed.
    """
    if importlib.util.find_spec(kind.module) is None:
        raise ConfigError(
            f"{name} is {kind.name}, and the package {kind.package} that reads it is not installed; "
            "pip install 'hetero-kv[documents]', or convert the file to plain text"
        )
    # Use this process's libraries, and none from the folder of the program.
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-P", "-X", "utf8", str(_PROGRAM), kind.name, str(SECONDS), str(MEMORY), str(most_bytes)]
    reader = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        # Ctrl-C in a terminal would reach all processes of the session.
        start_new_session=True,
    )
    try:
        text, errors = reader.communicate(content)
    finally:
        reader.kill()
        reader.wait()
    if reader.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ConfigError(f"{name} takes more than {SECONDS} s to read as {kind.name}; convert it to plain text")
    if reader.returncode:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2] or f"it ended with {reader.returncode}"
        raise ConfigError(f"{name} cannot be read as {kind.name}: {reason}; convert it to plain text")
    return text.decode()
