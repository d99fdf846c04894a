"""Parses and checks the names of modules that the user trusts."""

from __future__ import annotations

from typing import Any

from hetero_kv.errors import ConfigError, shown

TRUST_RULES = "trust_rules"


def trusted_names(value: Any, where: str) -> tuple[str, ...]:
    """The module names in `value`: one name, a list of names, or None for none.

    Raises ConfigError for anything else; the message names `where`.
    """
    names = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise ConfigError(f"{where}: {TRUST_RULES} is {shown(value)}; it must be a list of module names")
    for name in names:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.strip().split(".")):
            raise ConfigError(f"{where}: {TRUST_RULES} has {shown(name)}; name a module as in an import: my_methods")
    return tuple(name.strip() for name in names)
