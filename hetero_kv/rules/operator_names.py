"""Finds the operator class that a rule names. Importing a module runs it, so only trusted modules are imported.

Trusted are this package, the entry points of installed packages in the group `hetero_kv.operators`, and modules that
the user trusts by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import metadata
from typing import Any

from hetero_kv import operators
from hetero_kv.adapter.replacement import Operator
from hetero_kv.errors import ConfigError, shown
from hetero_kv.settings.setting import nearest_spelling

ENTRY_POINTS = "hetero_kv.operators"
_OWN = "hetero_kv"


def named_operator(name: str, where: str, trusted: Collection[str] = ()) -> type[Operator]:
    """The operator class called `name`: a dotted path, a name in `hetero_kv.operators`, or an entry point's name.

    Args:
        where: the rule, for errors.
        trusted: modules whose classes may be named; their submodules are trusted too.

    Raises:
        ConfigError: no such class, a class that is no operator, or a module that is not trusted, which is not imported.
    """
    package, _, short = name.rpartition(".")
    offered = {} if not package and hasattr(operators, short) else _offered()
    if package and name not in offered and not _is_trusted(package, {_OWN, *trusted}):
        raise ConfigError(f"{where}: {_untrusted(name, package)}")
    try:
        found = offered[name].load() if name in offered else _attribute(package, short)
        is_operator = _is_operator(found)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise anything while it is imported, SystemExit too
        reason = str(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{where}: class {shown(name)} cannot be imported ({reason}){_nearest_operator(name)}"
        ) from error
    if not is_operator:
        required = f"{Operator.__module__}.{Operator.__qualname__}"
        raise ConfigError(
            f"{where}: class {shown(name)} is not an operator; name a subclass of {required}{_nearest_operator(name)}"
        )
    return found


def _attribute(package: str, short: str) -> Any:
    return getattr(importlib.import_module(package) if package else operators, short)


def _is_trusted(package: str, trusted: Collection[str]) -> bool:
    return any(package == module or package.startswith(f"{module}.") for module in trusted)


@cache
def _offered() -> Mapping[str, metadata.EntryPoint]:
    """The entry points of installed packages, by name and by the dotted path of the class."""
    found = list(metadata.entry_points(group=ENTRY_POINTS))
    return {each.name: each for each in found} | {f"{each.module}.{each.attr}": each for each in found}


def _untrusted(name: str, package: str) -> str:
    near = nearest_spelling(name, [f"{operators.__name__}.{key}" for key in _known()])
    module = shown(package).strip("'\"")
    return (
        f"class {shown(name)} is in a module that is not trusted, and was not imported; read its code, then give "
        f"--trust_rules {module}, or name it in trust_rules of the settings file, inject or load_rules{near}"
    )


def _is_operator(thing: object) -> bool:
    if not (isinstance(thing, type) and issubclass(thing, Operator)) or thing is Operator:
        return False
    return not any(getattr(getattr(thing, name, None), "__isabstractmethod__", False) for name in dir(thing))


def _known() -> list[str]:
    return [key for key, thing in vars(operators).items() if _is_operator(thing)]


def _nearest_operator(name: str) -> str:
    known = _known()
    spellings = ["default", *(f"{operators.__name__}.{key}" for key in known)] if "." in name else ["default", *known]
    return nearest_spelling(name, spellings) or f"; known: {', '.join(spellings)}"
