"""Errors for the user: each names the thing at fault, its value, and the remedy."""

from __future__ import annotations

#: The most characters of an error's text; a longer one keeps its beginning and end.
LONGEST_TEXT = 2000
_KEPT_AT_END = 400


class HeteroKVError(ValueError):
    """Base of every error that this package raises for a user's mistake."""

    def __init__(self, text: object = "") -> None:
        super().__init__(shortened(str(text), LONGEST_TEXT))


class ConfigError(HeteroKVError):
    """A setting, rule or configuration file that cannot be used as written."""


class UnsupportedModelError(HeteroKVError):
    """The model does something that an operator cannot compute exactly."""


class OutOfMemoryError(HeteroKVError):
    """Memory is too small for a request: nothing was allocated, or all of it was freed."""


def shortened(text: str, longest: int) -> str:
    """`text`, or its beginning and end in `longest` characters, with a note of the gap between them."""
    if len(text) <= longest:
        return text
    gap = f" […{len(text) - longest:,} characters more…] "
    end = min(_KEPT_AT_END, (longest - len(gap)) // 4)
    return text[: longest - len(gap) - end] + gap + text[len(text) - end :]


def shown(value: object, longest: int = 300) -> str:
    """The repr of a value for messages, shortened."""
    try:
        return shortened(repr(value), longest)
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or endless nesting.
        return f"a {type(value).__name__} that is too large to show"


#: How torch's allocators, its libraries and C++ word it in a RuntimeError: on CPUs, on Windows, on GPUs, elsewhere.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch raised this error because memory ran out."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def brief_error(error: BaseException) -> str:
    """The type of a foreign error and the first line of its message, at most 200 characters."""
    first = str(error).partition("\n")[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
