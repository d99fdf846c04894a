"""Finds the operator that a rule names. Importing a module runs it, so only trusted modules are imported.

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
from hetero_kv.errors import ConfigError, shown
from hetero_kv.operators import DECLARATIONS
from hetero_kv.settings.declaration import LoadedOperator, OperatorDeclaration
from hetero_kv.settings.setting import nearest_spelling

ENTRY_POINTS = "hetero_kv.operators"
_OWN = "hetero_kv"


def declaration_of(operator: Any) -> OperatorDeclaration:
    """The declaration of an operator class."""
    declared = DECLARATIONS.get(operator.__name__)
    is_ours = declared is not None and declared.module == operator.__module__
    return declared if declared is not None and is_ours else LoadedOperator.of(operator)


def named_operator(name: str, where: str, trusted: Collection[str] = ()) -> OperatorDeclaration:
    """The operator called `name`: a dotted path, a name in `hetero_kv.operators`, or an entry point's name.

    No module is imported for an operator that ships.

    Args:
        where: the rule, for errors.
        trusted: modules whose classes may be named; their submodules are trusted too.

    Raises:
        ConfigError: no such class, a class that is no operator, or a module that is not trusted, which is not imported.
    """
    package, _, short = name.rpartition(".")
    declared = DECLARATIONS.get(short)
    if declared is not None and package in ("", operators.__name__, declared.module):
        return declared
    offered = {} if not package and short in operators.__all__ else _offered()
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
        base = operators.Operator
        required = f"{base.__module__}.{base.__qualname__}"
        raise ConfigError(
            f"{where}: class {shown(name)} is not an operator; name a subclass of {required}{_nearest_operator(name)}"
        )
    return declaration_of(found)


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
    near = nearest_spelling(name, [f"{operators.__name__}.{key}" for key in DECLARATIONS])
    module = shown(package).strip("'\"")
    return (
        f"class {shown(name)} is in a module that is not trusted, and was not imported; read its code, then give "
        f"--trust_rules {module}, or name it in trust_rules of the settings file, inject or load_rules{near}"
    )


def _is_operator(thing: object) -> bool:
    base = operators.Operator
    if not (isinstance(thing, type) and issubclass(thing, base)) or thing is base:
        return False
    return not any(getattr(getattr(thing, name, None), "__isabstractmethod__", False) for name in dir(thing))


def _nearest_operator(name: str) -> str:
    known = [f"{operators.__name__}.{key}" for key in DECLARATIONS] if "." in name else DECLARATIONS
    spellings = ["default", *known]
    return nearest_spelling(name, spellings) or f"; known: {', '.join(spellings)}"
