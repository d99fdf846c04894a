"""Maps operators to their settings dataclasses: one per family, or one per policy where a family has policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hetero_kv.operators import DECLARATIONS
from hetero_kv.settings.declaration import OperatorDeclaration
from hetero_kv.settings.description import choices_of
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.setting import Settings


class Owner(NamedTuple):
    """An operator with one of its settings dataclasses.

    Attributes:
        operator: the operator's name.
        chosen_by: the setting that selects the dataclass ("policy"); None if the operator has one dataclass only.
        choice: the value of `chosen_by`; None if that is None.
        settings: the dataclass.
        base: the dataclass that the operator names; every choice has its settings.
    """

    operator: str
    chosen_by: str | None
    choice: str | None
    settings: type[Settings]
    base: type[Settings]

    @property
    def label(self) -> str:
        """The owner as messages call it: "RetrievalAttention", "BoundedAttention (tova)"."""
        return self.operator if self.choice is None else f"{self.operator} ({self.choice})"


def owners_of(operator: OperatorDeclaration, choice: str | None = None) -> list[Owner]:
    """The owners of an operator, or that of `choice` alone if it is a valid one; [] if it has no settings."""
    if operator.settings_class is None:
        return []
    name, chosen_by = operator.name, operator.chosen_by
    if chosen_by is None:
        return [Owner(name, None, None, operator.settings_class, operator.settings_class)]
    choices = choices_of(operator.settings_class, chosen_by)
    chosen = [each for each in choices if choice is not None and each.casefold() == choice.strip().casefold()]
    found = ((each, operator.settings_class_for({chosen_by: each})) for each in chosen or choices)
    return [Owner(name, chosen_by, each, cls, operator.settings_class) for each, cls in found if cls is not None]


def owner_in_place(operator: OperatorDeclaration, settings: Any) -> Owner | None:
    """The owner of an injected operator's settings; None if it has no settings."""
    if settings is None or operator.settings_class is None:
        return None
    choice = getattr(settings, operator.chosen_by) if operator.chosen_by else None
    return Owner(operator.name, operator.chosen_by, choice, type(settings), operator.settings_class)


def registered_owners(more: Iterable[OperatorDeclaration] = ()) -> list[Owner]:
    """The owners of every operator that ships, and of `more`; each operator once."""
    operators = dict.fromkeys((*DECLARATIONS.values(), *more))
    simple_first = sorted(operators, key=lambda operator: operator.chosen_by is not None)
    return [owner for operator in simple_first for owner in owners_of(operator)]


def flat_classes(owners: Iterable[Owner]) -> tuple[type[Settings], ...]:
    """The dataclasses whose settings a flat block may contain: the engine's, then the owners', each once."""
    return tuple(dict.fromkeys((EngineSettings, *(owner.settings for owner in owners))))


def every_settings_class() -> tuple[type[Settings], ...]:
    """The dataclasses of the engine and of every registered operator, for a flat block that is read without rules."""
    return flat_classes(registered_owners())


def labels(owners: Iterable[Owner], of: Sequence[Owner]) -> str:
    """`owners` in words: the operator's name, with its choices in brackets unless all of those in `of` are present."""
    by_operator: dict[str, list[Owner]] = {}
    for owner in owners:
        by_operator.setdefault(owner.operator, []).append(owner)
    words = []
    for operator, theirs in by_operator.items():
        every = {owner.choice for owner in of if owner.operator == operator}
        choices = list(dict.fromkeys(owner.choice for owner in theirs if owner.choice is not None))
        words.append(f"{operator} ({_joined(choices)})" if choices and set(choices) != every else operator)
    return _joined(words)


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
