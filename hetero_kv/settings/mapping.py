"""Converts a mapping (a block of YAML, flags) to settings: canonical names, checked values, and errors with a place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hetero_kv.errors import ConfigError, shown
from hetero_kv.settings.located_yaml import located
from hetero_kv.settings.setting import Entry, SettingError, entries_of, nearest_spelling

S = TypeVar("S")


def canonical(classes: Sequence[type], mapping: Mapping[Any, Any] | None, *, where: str) -> dict[str, Any]:
    """The settings in `mapping` by canonical name, with checked and converted values.

    Args:
        classes: the settings classes whose fields the mapping may contain. If several have a setting of one name, a
            value must be valid for at least one of them.
        mapping: key (name or alias, with dashes or underscores) -> value; None is an empty block of YAML.
        where: the place that errors name, e.g. "rules.yaml: rule 2 (RetrievalAttention): kwargs".

    Raises:
        ConfigError: not a mapping, an unknown key (with the nearest right spelling), one setting under two names, or a
            value of the wrong type or out of range.
    """
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: {shown(mapping)} is not a mapping; write `key: value` pairs")
    entries: dict[str, list[Entry]] = {}
    for cls in classes:
        for entry in entries_of(cls).values():
            for spelling in (entry.name, *entry.constraints.aliases):
                entries.setdefault(spelling, []).append(entry)
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in mapping.items():
        place = located(where, mapping, key)
        known = entries.get(key.replace("-", "_")) if isinstance(key, str) else None
        if known is None:
            raise ConfigError(f"{place}: {_unknown(key, entries)}")
        name = known[0].name
        if name in found:
            raise ConfigError(f"{place}: {spelled[name]!r} and {key!r} are the same setting, {name}; keep one of them")
        spelled[name] = key
        try:
            found[name] = _checked(known, key, value)
        except SettingError as error:
            raise ConfigError(f"{place}: {error}") from error
    return found


def _checked(entries: Sequence[Entry], key: str, value: Any) -> Any:
    """`value` converted by the first of `entries` for which it is valid. Raises SettingError if there is none."""
    refusals: dict[str, SettingError] = {}
    for entry in entries:
        try:
            return entry.check(key, value)
        except SettingError as error:
            refusals.setdefault(error.remedy, error)
    if len(refusals) == 1:
        raise next(iter(refusals.values()))
    raise SettingError(key, value, ", or else ".join(refusals))


def _unknown(key: object, entries: Mapping[str, object]) -> str:
    if not entries:
        return f"unknown setting {shown(key)}; there are no settings here"
    near = nearest_spelling(key, entries)
    return f"unknown setting {shown(key)}{near or '; known: ' + ', '.join(entries)}"


def settings_from_mapping(
    cls: type[S], mapping: Mapping[Any, Any] | None, *, where: str, defaults: S | None = None
) -> S:
    """An instance of the settings class `cls` with the values of `mapping`, and else those of `defaults`.

    Args:
        mapping: key (name or alias) -> value; None is an empty block of YAML.
        where: the place that errors name.
        defaults: an instance of `cls`; None for the defaults of the class.

    Raises:
        ConfigError: what `canonical` refuses, and values that exclude each other.
    """
    overrides = canonical((cls,), mapping, where=where)
    try:
        # Settings are checked against each other only once all are set, since an override may resolve a conflict.
        return cls(**overrides) if defaults is None else dataclasses.replace(defaults, **overrides)  # type: ignore[type-var]
    except SettingError as error:
        raise ConfigError(f"{located(where, mapping or {})}: {error}") from error
