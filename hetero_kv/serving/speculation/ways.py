"""The ways to guess tokens, as a setting."""

from __future__ import annotations

from typing import Literal, get_args

from hetero_kv.errors import ConfigError

#: off: one token at a time. lookup: what followed the same words earlier in the sequence. auto: lookup, where the
#: model and its rules can verify guesses.
Way = Literal["off", "lookup", "auto"]


def require_way(value: str) -> str:
    """The way to guess. Raises ConfigError for another value."""
    if value not in get_args(Way):
        raise ConfigError(f"speculation is {value!r}; it must be one of {', '.join(get_args(Way))}")
    return value
