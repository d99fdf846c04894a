"""Errors for the user: each names the thing at fault, the value it had, and what would be right."""

from __future__ import annotations

#: Characters of an error's text; of a longer one, the beginning and the end are kept.
LONGEST_TEXT = 2000
_KEPT_AT_END = 400


class HeteroKVError(ValueError):
    """Base of every error this package raises for a user's mistake."""

    def __init__(self, text: object = "") -> None:
        super().__init__(shortened(str(text), LONGEST_TEXT))


class ConfigError(HeteroKVError):
    """A setting, rule or configuration file that cannot be used as written."""


class UnsupportedModelError(HeteroKVError):
    """The model does something that an operator cannot compute exactly."""


class OutOfMemoryError(HeteroKVError):
    """Memory has no room for what was asked: nothing was allocated, or nothing of it remains."""


def shortened(text: str, longest: int) -> str:
    """`text`, or as much of its beginning and end as `longest` characters hold; what stands between them says so."""
    if len(text) <= longest:
        return text
    gap = f" […{len(text) - longest:,} characters more…] "
    end = min(_KEPT_AT_END, (longest - len(gap)) // 4)
    return text[: longest - len(gap) - end] + gap + text[len(text) - end :]


def shown(value: object, longest: int = 300) -> str:
    """A value as messages show it: as Python writes it, shortened."""
    try:
        return shortened(repr(value), longest)
    except (ValueError, RecursionError):
        # A number of thousands of digits, and nesting without end.
        return f"a {type(value).__name__} that is too large to show"


#: What torch's allocators, its libraries and C++ say in a RuntimeError: on CPUs, on Windows, on GPUs, elsewhere.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch raised this because it found no memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def said_briefly(error: BaseException) -> str:
    """The kind of a foreign error and the first line of what it says, at most 200 characters of it."""
    first = str(error).partition("\n")[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
