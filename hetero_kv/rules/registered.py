"""Everything that rules can name, and what the layers of operators count, with meanings; asked of the operators."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from hetero_kv import operators
from hetero_kv.adapter.operator import Operator
from hetero_kv.engine import statistics
from hetero_kv.engine.statistics import Statistic
from hetero_kv.store import storage


class Entry(NamedTuple):
    """A registered piece: its name as YAML spells it, and one line about it."""

    name: str
    meaning: str


def operator_classes() -> dict[str, type[Operator]]:
    """The operators that a rule can put into a model, by name."""
    exported: dict[str, Any] = {name: getattr(operators, name) for name in operators.__all__}
    return {
        name: thing
        for name, thing in exported.items()
        if issubclass(thing, Operator) and thing is not Operator and not _is_abstract(thing)
    }


@cache
def _is_abstract(cls: type) -> bool:
    # `nn.Module` has no ABCMeta, so that `inspect.isabstract` does not see it.
    return any(getattr(member, "__isabstractmethod__", False) for _, member in inspect.getmembers_static(cls))


def registered() -> dict[str, list[Entry]]:
    """What is registered, by kind, where each kind is titled with the key that names it."""
    classes = operator_classes()
    known = {"Operators (class)": [Entry(name, cls.meaning) for name, cls in classes.items()]}
    for cls in classes.values():
        known |= {kind: [Entry(*entry) for entry in pieces.items()] for kind, pieces in cls.registries().items()}
    return known | {"Storage types (kv_type)": [Entry(name, storage.get(name).meaning) for name in storage.names()]}


def layer_statistics() -> Mapping[str, Statistic]:
    """What the cache layers of some operator count, by name."""
    # Here, because all operators are imported.
    return statistics.registered()
