"""A registry of the implementations that a setting names: the settings of each, and its class, loaded on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

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
        home: its class, or the dotted name of that.
    """

    name: str
    meaning: str
    settings: type[S]
    home: type[T] | str

    @property
    def implementation(self) -> type[T]:
        """Its class; the module that defines it is imported now."""
        if not isinstance(self.home, str):
            return self.home
        module, _, name = self.home.rpartition(".")
        return cast(type[T], getattr(importlib.import_module(module), name))


class Registry(Generic[S, T]):
    """The implementations by name.

    Args:
        setting: the setting that names one.
        what: the kind of implementation, for errors ("an eviction policy").
    """

    def __init__(self, setting: str, what: str) -> None:
        self.setting, self._what = setting, what
        self.known: dict[str, Registered[S, T]] = {}

    def register(self, name: str, *, meaning: str, implementation: type[T] | str) -> Callable[[C], C]:
        """Register the decorated settings dataclass as that of `name`.

        Args:
            implementation: the class, or its dotted name, so that its module is imported only when it is needed.
        """

        def keep(settings: C) -> C:
            self.known[name] = Registered(name, meaning, settings, implementation)
            return settings

        return keep

    def names(self) -> tuple[str, ...]:
        """The registered names, sorted."""
        return tuple(sorted(self.known))

    def meanings(self) -> dict[str, str]:
        """The registered names, sorted, with their meanings."""
        return {name: self.known[name].meaning for name in self.names()}

    def get(self, name: str) -> Registered[S, T]:
        """The implementation called `name`. Raises HeteroKVError for an unknown one."""
        if name not in self.known:
            raise HeteroKVError(
                f"{self.setting} {name!r} is not {self._what}{nearest_spelling(name, self.names())}; known: "
                f"{', '.join(self.names())}"
            )
        return self.known[name]

    def settings_in(self, kwargs: Mapping[Any, Any], default: type[S]) -> type[S]:
        """The settings dataclass of the implementation that `kwargs` name, in any case; `default` for another name.

        A wrong name is refused later, as a setting's value, with the place in the file.
        """
        word = str(kwargs.get(self.setting, getattr(default, self.setting))).casefold()
        return next((each.settings for name, each in self.known.items() if name.casefold() == word), default)
