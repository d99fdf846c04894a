"""Lists everything that rules can name, and the statistics of cache layers, each with its meaning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from hetero_kv import operators
from hetero_kv.adapter.replacement import Operator
from hetero_kv.engine import statistics
from hetero_kv.engine.statistics import Statistic
from hetero_kv.store import storage


class RegisteredName(NamedTuple):
    """A registered operator, policy or storage type: its name in YAML, and one line about it."""

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
    # `nn.Module` has no ABCMeta, so `inspect.isabstract` misses it.
    return any(getattr(member, "__isabstractmethod__", False) for _, member in inspect.getmembers_static(cls))


def registered() -> dict[str, list[RegisteredName]]:
    """The registered entries by kind; each kind's title includes the YAML key that names it."""
    classes = operator_classes()
    known = {"Operators (class)": [RegisteredName(name, cls.meaning) for name, cls in classes.items()]}
    for cls in classes.values():
        known |= {
            kind: [RegisteredName(*entry) for entry in pieces.items()] for kind, pieces in cls.registries().items()
        }
    return known | {
        "Storage types (kv_type)": [RegisteredName(name, storage.get(name).meaning) for name in storage.names()]
    }


def layer_statistics() -> Mapping[str, Statistic]:
    """The statistics that cache layers of any operator count, by name."""
    # Complete here only, because this module imports all operators.
    return statistics.registered()
