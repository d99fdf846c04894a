"""Declares operators: what rules, flags and documentation know of one before its class is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero_kv.settings.registry import Registry

Pieces = Mapping[str, Mapping[str, str]]


def _no_pieces() -> Pieces:
    return {}


@dataclass(frozen=True)
class OperatorDeclaration:
    """An operator without its class, whose import takes seconds.

    Attributes:
        name: the class's name.
        module: the module that defines the class.
        meaning: one line for `methods` and the documentation.
        settings_class: the dataclass of its settings; None if it has none.
        variants: the registry of the implementations that its settings choose from, each with its own dataclass.
        registries: returns what its settings can name, as `Operator.registries`.
    """

    name: str
    module: str
    meaning: str
    settings_class: Any = None
    variants: Registry[Any, Any] | None = None
    registries: Callable[[], Pieces] = _no_pieces

    @property
    def chosen_by(self) -> str | None:
        """The setting that chooses the dataclass; None if there is one dataclass only."""
        return None if self.variants is None else self.variants.setting

    def settings_class_for(self, kwargs: Mapping[Any, Any]) -> Any:
        """The dataclass of a rule's `kwargs`: `settings_class`, or that of the variant that `kwargs` choose."""
        return self.settings_class if self.variants is None else self.variants.settings_in(kwargs, self.settings_class)

    def load(self) -> Any:
        """The operator's class; the module that defines it is imported now."""
        return getattr(importlib.import_module(self.module), self.name)


@dataclass(frozen=True)
class LoadedOperator(OperatorDeclaration):
    """The declaration of an operator class that does not ship, made from the class.

    Attributes:
        operator: the class, a subclass of `hetero_kv.adapter.replacement.Operator`.
    """

    operator: Any = None

    @classmethod
    def of(cls, operator: Any) -> LoadedOperator:
        """The declaration of this class."""
        return cls(
            operator.__name__,
            operator.__module__,
            operator.meaning,
            operator.settings_class,
            registries=operator.registries,
            operator=operator,
        )

    @property
    def chosen_by(self) -> str | None:
        return self.operator.chosen_by

    def settings_class_for(self, kwargs: Mapping[Any, Any]) -> Any:
        return self.operator.settings_class_for(kwargs)

    def load(self) -> Any:
        return self.operator
