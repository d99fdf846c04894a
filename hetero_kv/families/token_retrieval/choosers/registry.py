"""Which ways to choose tokens there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hetero_kv.errors import HeteroKVError
from hetero_kv.families.token_retrieval.choosers.chooser import Chooser
from hetero_kv.families.token_retrieval.choosers.settings import TokenSettings
from hetero_kv.settings.setting import nearest_spelling

C = TypeVar("C", bound=type[Chooser])


@dataclass(frozen=True)
class RegisteredChooser:
    """One way to choose tokens.

    Attributes:
        name: as written in YAML (`chooser`).
        meaning: one line for the documentation.
        settings: the dataclass of its settings.
        chooser: its class.
    """

    name: str
    meaning: str
    settings: type[TokenSettings]
    chooser: type[Chooser]


_REGISTRY: dict[str, RegisteredChooser] = {}


def register(name: str, *, meaning: str, settings: type[TokenSettings]) -> Callable[[C], C]:
    """Make the decorated subclass of Chooser known as chooser `name`."""

    def keep(chooser: C) -> C:
        _REGISTRY[name] = RegisteredChooser(name, meaning, settings, chooser)
        return chooser

    return keep


def names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_REGISTRY))


def get(name: str) -> RegisteredChooser:
    """The chooser called `name`. Raises HeteroKVError for an unknown one."""
    if name not in _REGISTRY:
        raise HeteroKVError(
            f"chooser {name!r} is no way to choose tokens{nearest_spelling(name, names())}; known: {', '.join(names())}"
        )
    return _REGISTRY[name]
