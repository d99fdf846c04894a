"""The argument by which modules of transformers are given their cache: its name is not the same in every version.

Since 5.24 `past_key_values` is `cache`, and the old name is deprecated; models whose code comes with them keep it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

#: The names that transformers' own modules have for it, the oldest last; those of states alone included.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "past_key_value")


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments of a model or one of its layers; None where there is none."""
    cache = arguments.get("past_key_values")
    return arguments.get("cache") if cache is None else cache


def cache_name(forward: Callable[..., Any]) -> str:
    """The name of the cache among the parameters of `forward`; `past_key_values` where it names none of them."""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in names), "past_key_values")


def as_cache(forward: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """The keyword argument that gives `forward` this cache."""
    return {cache_name(forward): cache}
