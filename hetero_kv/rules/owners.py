"""Which operators take which settings: the families, and of a family with policies each policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hetero_kv.adapter.operator import Operator
from hetero_kv.rules.registered import operator_classes
from hetero_kv.settings.description import choices_of
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.setting import Settings


class Owner(NamedTuple):
    """An operator with a settings dataclass that it takes.

    Attributes:
        operator: the operator's name.
        chosen_by: the setting that chooses the dataclass ("policy"), and `choice` its value; None where there is one.
        settings: the dataclass.
        base: the dataclass that the operator names; its settings are those of every choice.
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


def owners_of(operator: type[Operator], choice: str | None = None) -> list[Owner]:
    """The dataclasses that an operator may take, none where it takes no settings; that of `choice`, where it is one."""
    if operator.settings_class is None:
        return []
    name, chosen_by = operator.__name__, operator.chosen_by
    if chosen_by is None:
        return [Owner(name, None, None, operator.settings_class, operator.settings_class)]
    choices = choices_of(operator.settings_class, chosen_by)
    chosen = [each for each in choices if choice is not None and each.casefold() == choice.strip().casefold()]
    found = ((each, operator.settings_class_for({chosen_by: each})) for each in chosen or choices)
    return [Owner(name, chosen_by, each, cls, operator.settings_class) for each, cls in found if cls is not None]


def owner_in_place(operator: type[Operator], settings: Any) -> Owner | None:
    """The owner of the settings that an operator has; None where it has none."""
    if settings is None or operator.settings_class is None:
        return None
    choice = getattr(settings, operator.chosen_by) if operator.chosen_by else None
    return Owner(operator.__name__, operator.chosen_by, choice, type(settings), operator.settings_class)


def registered_owners(more: Iterable[type[Operator]] = ()) -> list[Owner]:
    """The owners of every registered operator, and of `more`; each operator once."""
    operators = dict.fromkeys((*operator_classes().values(), *more))
    simple_first = sorted(operators, key=lambda operator: operator.chosen_by is not None)
    return [owner for operator in simple_first for owner in owners_of(operator)]


def flat_classes(owners: Iterable[Owner]) -> tuple[type[Settings], ...]:
    """The settings that a flat block may hold for these owners: the engine's, then theirs, each dataclass once."""
    return tuple(dict.fromkeys((EngineSettings, *(owner.settings for owner in owners))))


def every_settings_class() -> tuple[type[Settings], ...]:
    """What a flat block may hold whatever the rules are: the settings of the engine and of every operator."""
    return flat_classes(registered_owners())


def labels(owners: Iterable[Owner], of: Sequence[Owner]) -> str:
    """`owners` in words; an operator alone where all that it has among `of` are there, else with its choices."""
    given: dict[str, list[Owner]] = {}
    for owner in owners:
        given.setdefault(owner.operator, []).append(owner)
    words = []
    for operator, theirs in given.items():
        every = {owner.choice for owner in of if owner.operator == operator}
        choices = list(dict.fromkeys(owner.choice for owner in theirs if owner.choice is not None))
        words.append(f"{operator} ({_joined(choices)})" if choices and set(choices) != every else operator)
    return _joined(words)


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
