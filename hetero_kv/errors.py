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
