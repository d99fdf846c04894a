"""Everything that rules can name: operators, representative and storage types, eviction policies, with meanings."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from hetero_kv import operators
from hetero_kv.adapter.operator import Operator
from hetero_kv.families.bounded import eviction
from hetero_kv.families.retrieval import representatives
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


def _is_abstract(cls: type) -> bool:
    # `nn.Module` has no ABCMeta, so that `inspect.isabstract` does not see it.
    return any(getattr(member, "__isabstractmethod__", False) for _, member in inspect.getmembers_static(cls))


def registered() -> dict[str, list[Entry]]:
    """What is registered, by kind, where each kind is titled with the key that names it."""
    return {
        "Operators (class)": [Entry(name, cls.meaning) for name, cls in operator_classes().items()],
        "Representatives of a block (representative_type)": [
            Entry(name, representatives.get(name).meaning) for name in representatives.names()
        ],
        "Eviction policies of BoundedAttention (policy)": [
            Entry(name, eviction.get(name).meaning) for name in eviction.names()
        ],
        "Storage types (kv_type)": [Entry(name, storage.get(name).meaning) for name in storage.names()],
    }
