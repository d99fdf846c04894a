"""Decodes a file's bytes as text: UTF-8, or the encoding that a byte order mark names."""

from __future__ import annotations

import codecs

from hetero_kv.errors import ConfigError

# UTF-32 comes first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# How many first bytes to check, and the share of zeros in UTF-16 text of a script whose characters fit into one byte.
_LOOKED_AT, _ZEROS = 1024, 0.4


def marked_encoding(beginning: bytes) -> str | None:
    """The encoding that a byte order mark names, in Python's spelling; None without a mark."""
    return next((encoding for mark, encoding in _MARKS if beginning.startswith(mark)), None)


def is_wide(beginning: bytes) -> bool:
    """Whether a byte order mark names UTF-16 or UTF-32, in which zero bytes are parts of characters."""
    return (marked_encoding(beginning) or "utf-8") != "utf-8"


def decoded(content: bytes, name: str) -> str:
    """The text without its byte order mark; `name` is the file's name in errors.

    Raises ConfigError if the bytes are not valid in that encoding, or contain a zero character.
    """
    encoding = marked_encoding(content) or "utf-8"
    mark = next((mark for mark, named in _MARKS if named == encoding and content.startswith(mark)), b"")
    try:
        text = content[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        place = len(mark) + error.start
        called = encoding[:-3].upper() if is_wide(content) else "UTF-8"
        raise ConfigError(
            f"{name} is not {called} text (byte {place} is 0x{content[place]:02x}); convert it to plain UTF-8 text"
        ) from error
    if "\0" in text:
        place = len(mark) + len(text[: text.index("\0")].encode(encoding))
        raise ConfigError(binary(content, place, name))
    return text


def binary(content: bytes, place: int, name: str) -> str:
    """The error text for a file with a zero byte at `place`; `content` is its beginning."""
    beginning = content[:_LOOKED_AT]
    shares = [(part := beginning[first::2]).count(0) / max(1, len(part)) for first in (0, 1)]
    if not is_wide(beginning) and max(shares) > _ZEROS and min(shares) < 1 - _ZEROS:
        return (
            f"{name} looks like UTF-16 or UTF-32 text without a byte order mark, so its encoding is unknown; "
            "convert it to UTF-8"
        )
    return f"{name} is binary (byte {place} is 0x00), not text; convert it to plain UTF-8 text"
