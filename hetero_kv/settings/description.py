"""Describes settings for users: names, types in words, choices, and the name of a method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView
from typing import Any, NamedTuple

from hetero_kv.settings.setting import entries_of, entry_of


class SettingRow(NamedTuple):
    """One setting as the settings file, `--help` and the documentation show it."""

    name: str
    type: str
    default: Any
    unit: str | None
    aliases: tuple[str, ...]
    formerly: tuple[str, ...]
    doc: str


def describe(cls: type) -> Iterator[SettingRow]:
    """The settings of `cls` in the order of its fields; `type` is in words, with the range and the choices."""
    return (description_of(cls, name) for name in entries_of(cls))


def description_of(cls: type, name: str) -> SettingRow:
    """The setting of `cls` with this canonical name; `type` is in words, with the range and the choices."""
    entry = entries_of(cls)[name]
    limits = entry.constraints
    return SettingRow(
        entry.name, entry.expected(), entry.default, limits.unit, limits.aliases, limits.formerly, limits.doc
    )


def setting_names(cls: type) -> KeysView[str]:
    """The canonical names of the settings of `cls`, in the order of its fields."""
    return entries_of(cls).keys()


def oldest_names(cls: type) -> dict[str, str]:
    """The oldest name of every setting of `cls` that was renamed, by today's name."""
    return {
        name: entry.constraints.formerly[0] for name, entry in entries_of(cls).items() if entry.constraints.formerly
    }


def choices_of(cls: type, name: str) -> tuple[str, ...]:
    """The allowed texts of the setting `name` of `cls`."""
    return entries_of(cls)[name].constraints.allowed()


def takes_any_text(classes: Iterable[type], spelling: str) -> bool:
    """Whether the setting of this name or alias is free text in every class that has it."""
    known = [entry for cls in classes if (entry := entry_of(cls, spelling.replace("-", "_")))]
    return bool(known) and all(entry.annotation is str and entry.constraints.choices is None for entry in known)


def method_words(settings: object) -> str:
    """The settings that distinguish a method of an operator, e.g. "QUEST, 2 per block, SEPARATE"; "" if none do."""
    cls: Any = type(settings)
    entries = entries_of(cls).values()
    return ", ".join(
        entry.constraints.names_method.format(getattr(settings, entry.name))
        for entry in entries
        if entry.constraints.names_method is not None
    )
