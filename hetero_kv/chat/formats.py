"""Formats of documents beside plain text, and what they say.

Who made a document may have made it to harm a program that reads it. So a process of its own takes it apart,
`format_reader.py`, within limits of time and memory; what the libraries raise there is an error of ours here.
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

#: Of processor time, for a document. A page of a PDF takes some hundredths.
SECONDS = 120
#: Bytes that a library may take, beside what the interpreter takes.
MEMORY = 2 << 30
_PROGRAM = Path(__file__).with_name("format_reader.py")


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        module, package: of the library that reads it: as Python imports it, and as pip installs it.
        without_text: what to do about a document that holds none; "" where nothing special.
    """

    name: str
    module: str
    package: str
    without_text: str = ""


PDF = Format(
    "PDF", "pypdf", "pypdf", "its pages are pictures: let a program for character recognition put text into it"
)
DOCX = Format("DOCX", "docx", "python-docx")
HTML = Format("HTML", "markdownify", "markdownify")

_HTML_SUFFIXES = (".html", ".htm", ".xhtml")


def format_of(beginning: bytes, suffix: str) -> Format | None:
    """The format of a document by its first bytes and its file name's suffix; None for plain text, source and such."""
    if b"%PDF-" in beginning[:1024]:
        return PDF
    if beginning.startswith(b"PK\x03\x04"):
        return DOCX
    # In UTF-16 and UTF-32 too, where zeros stand between the letters.
    words = beginning[:1024].lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n").replace(b"\0", b"").lower()
    is_page = not suffix and words.startswith((b"<!doctype html", b"<html"))
    return HTML if is_page or suffix.lower() in _HTML_SUFFIXES else None


def text_in(content: bytes, kind: Format, name: str, most_bytes: int) -> str:
    """What a document says.

    Args:
        name: of the document, in errors.
        most_bytes: that its text may have, in UTF-8.

    Raises:
        ConfigError: it is damaged, encrypted, or takes more time, memory or text than any document needs; or the
            library is not installed.
    """
    if importlib.util.find_spec(kind.module) is None:
        raise ConfigError(
            f"{name} is {kind.name}, which the package {kind.package} reads, and it is not installed; "
            "pip install 'hetero-kv[documents]', or convert it to plain text"
        )
    # The same libraries as here, and none from wherever the program lies.
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-P", "-X", "utf8", str(_PROGRAM), kind.name, str(SECONDS), str(MEMORY), str(most_bytes)]
    reader = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        # Ctrl-C in a terminal goes to all of its processes.
        start_new_session=True,
    )
    try:
        text, said = reader.communicate(content)
    finally:
        reader.kill()
        reader.wait()
    if reader.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ConfigError(f"{name} takes more than {SECONDS} s to read as {kind.name}; convert it to plain text")
    if reader.returncode:
        reason = said.decode(errors="replace").strip().rpartition("\n")[2] or f"it ended with {reader.returncode}"
        raise ConfigError(f"{name} cannot be read as {kind.name}: {reason}; convert it to plain text")
    return text.decode()
