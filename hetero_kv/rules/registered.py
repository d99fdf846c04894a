"""Lists everything that rules can name, and the statistics of cache layers, each with its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hetero_kv.engine import statistics
from hetero_kv.engine.statistics import Statistic
from hetero_kv.operators import DECLARATIONS
from hetero_kv.store import storage

if TYPE_CHECKING:
    from hetero_kv.adapter.replacement import Operator


class RegisteredName(NamedTuple):
    """A registered operator, policy or storage type: its name in YAML, and one line about it."""

    name: str
    meaning: str


def operator_classes() -> dict[str, type[Operator]]:
    """The operators that a rule can put into a model, by name; their modules are imported now."""
    return {name: declaration.load() for name, declaration in DECLARATIONS.items()}


def registered() -> dict[str, list[RegisteredName]]:
    """The registered entries by kind; each kind's title includes the YAML key that names it."""
    known = {"Operators (class)": [RegisteredName(name, each.meaning) for name, each in DECLARATIONS.items()]}
    for each in DECLARATIONS.values():
        known |= {
            kind: [RegisteredName(*entry) for entry in pieces.items()] for kind, pieces in each.registries().items()
        }
    return known | {
        "Storage types (kv_type)": [RegisteredName(name, storage.get(name).meaning) for name in storage.names()]
    }


def layer_statistics() -> Mapping[str, Statistic]:
    """The statistics that cache layers of any operator count, by name."""
    # The modules of operators register them.
    operator_classes()
    return statistics.registered()
