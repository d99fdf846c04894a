"""The name of the cache argument of transformers' modules, which differs between versions.

transformers 5.24 renames `past_key_values` to `cache` and deprecates the old name; models that bring their own code
keep it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

#: The name in models that keep states alone (Mamba), which pass over the others without a word.
STATE_NAME = "cache_params"
#: Names of the cache argument in transformers' modules, the oldest last, including those of state-only modules.
CACHE_NAMES = ("cache", "past_key_values", STATE_NAME, "past_key_value")


def passed_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a model or one of its layers; None without a cache."""
    cache = arguments.get("past_key_values")
    if cache is None:
        cache = arguments.get("cache")
    return arguments.get(STATE_NAME) if cache is None else cache


def renamed(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """The keyword arguments of a call, for a model that calls its cache `name`: a model of states alone too takes
    `past_key_values`.
    """
    if name != STATE_NAME or arguments.get("past_key_values") is None:
        return arguments
    others = {each: value for each, value in arguments.items() if each != "past_key_values"}
    return {**others, name: arguments["past_key_values"]}


def cache_name(forward: Callable[..., Any]) -> str:
    """The name of the cache among the parameters of `forward`; `past_key_values` if none of the known names is."""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in names), "past_key_values")


def as_cache(forward: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """The keyword argument that passes this cache to `forward`."""
    return {cache_name(forward): cache}
