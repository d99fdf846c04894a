"""The ways to guess tokens, as a setting."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Literal, get_args

from hetero_kv.errors import ConfigError
from hetero_kv.models.named import NAMED_MODELS

#: off: one token at a time. lookup: what followed the same words earlier in the sequence. sparse: the model itself, by
#: attention to few blocks. auto: lookup, where the model and its rules can verify guesses.
Way = Literal["off", "lookup", "sparse", "auto"]
WAYS: tuple[str, ...] = get_args(Way)


def require_way(value: str, ways: Collection[str] = WAYS) -> str:
    """The way to guess, of a request or an engine.

    Args:
        ways: those that there are; the name of the draft model that is loaded is one too.

    Raises ConfigError for another value.
    """
    if value in ways:
        return value
    raise ConfigError(
        f"speculation is {value!r}; it must be one of {', '.join(ways)}; a draft model must be loaded from the start "
        "(--speculation PATH)"
    )


def require_way_or_model(value: str) -> str:
    """A way to guess, or what may be the name or path of a draft model; nothing is opened.

    Raises ConfigError for a word that is neither.
    """
    if value in WAYS or value in NAMED_MODELS or os.sep in value or "/" in value or (value and Path(value).exists()):
        return value
    raise ConfigError(
        f"speculation is {value!r}; it must be one of {', '.join(WAYS)}, or a draft model: a file, a folder, or one of "
        f"{', '.join(NAMED_MODELS)}"
    )
