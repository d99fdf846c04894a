"""A registry of the implementations that a setting names, each with its settings dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hetero_kv.errors import HeteroKVError
from hetero_kv.settings.setting import nearest_spelling

S = TypeVar("S")
T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Registered(Generic[S, T]):
    """One implementation.

    Attributes:
        name: as written in YAML.
        meaning: one line for the documentation.
        settings: its settings dataclass.
        implementation: its class.
    """

    name: str
    meaning: str
    settings: type[S]
    implementation: type[T]


class Registry(Generic[S, T]):
    """The implementations by name.

    Args:
        setting: the setting that names one.
        what: the kind of implementation, for errors ("an eviction policy").
    """

    def __init__(self, setting: str, what: str) -> None:
        self._setting, self._what = setting, what
        self.known: dict[str, Registered[S, T]] = {}

    def register(self, name: str, *, meaning: str, settings: type[S]) -> Callable[[C], C]:
        """Register the decorated class as `name`."""

        def keep(implementation: C) -> C:
            self.known[name] = Registered(name, meaning, settings, implementation)
            return implementation

        return keep

    def names(self) -> tuple[str, ...]:
        """The registered names, sorted."""
        return tuple(sorted(self.known))

    def get(self, name: str) -> Registered[S, T]:
        """The implementation called `name`. Raises HeteroKVError for an unknown one."""
        if name not in self.known:
            raise HeteroKVError(
                f"{self._setting} {name!r} is not {self._what}{nearest_spelling(name, self.names())}; known: "
                f"{', '.join(self.names())}"
            )
        return self.known[name]
