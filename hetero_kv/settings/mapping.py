"""Converts a mapping (a block of YAML, flags) to settings: canonical keys, checked values, and errors with a place.

Another program's name for a setting (an alias) means the setting wherever its name does. A former name means it for the
classes that had it under that name: a file keeps its meaning after two classes' settings became one name. Where it has
more than one meaning, the former name itself is the canonical key, and each class finds its own setting by it
(`entry_of`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hetero_kv.errors import ConfigError, shown
from hetero_kv.settings.former_names import tell
from hetero_kv.settings.located_yaml import located
from hetero_kv.settings.setting import Entry, SettingError, entries_of, entry_of, nearest_spelling

S = TypeVar("S")


def canonical(classes: Sequence[type], mapping: Mapping[Any, Any] | None, *, where: str) -> dict[str, Any]:
    """The settings in `mapping` by canonical key, with checked and converted values.

    Args:
        classes: the settings classes whose fields the mapping may contain. If several have a setting of one name, a
            value must be valid for at least one of them.
        mapping: key (name, alias or former name, with dashes or underscores) -> value; None is an empty block of YAML.
        where: the place that errors name, e.g. "rules.yaml: rule 2 (RetrievalAttention): kwargs".

    Raises:
        ConfigError: not a mapping, an unknown key (with the nearest right spelling), one setting under two names, or a
            value of the wrong type or out of range.
    """
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: {shown(mapping)} is not a mapping; write `key: value` pairs")
    found: dict[str, Any] = {}
    spelled: dict[tuple[type, str], str] = {}
    for key, value in mapping.items():
        place = located(where, mapping, key)
        spelling = key.replace("-", "_") if isinstance(key, str) else ""
        known = [entry for cls in classes if (entry := entry_of(cls, spelling))]
        if not known:
            raise ConfigError(f"{place}: {_unknown(key, classes)}")
        today = [entry for entry in known if spelling not in entry.constraints.formerly]
        if not today:
            tell(spelling, known[0].name, place)
        canonical_key = today[0].name if today else _key_of_former(spelling, known, classes)
        for cls in classes:
            entry = entry_of(cls, canonical_key)
            other = spelled.setdefault((cls, entry.name), key) if entry else key
            if entry and other != key:
                raise ConfigError(
                    f"{place}: {other!r} and {key!r} are the same setting, {entry.name}; keep one of them"
                )
        try:
            found[canonical_key] = _checked(known, key if today else known[0].name, value)
        except SettingError as error:
            raise ConfigError(f"{place}: {error}") from error
    return found


def _key_of_former(spelling: str, known: Sequence[Entry], classes: Sequence[type]) -> str:
    """Today's name of the setting that was called `spelling`, or `spelling` if not all of `classes` agree on it."""
    name = known[0].name
    having = [cls for cls in classes if name in entries_of(cls)]
    return name if all(entry.name == name for entry in known) and len(having) == len(known) else spelling


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


def _unknown(key: object, classes: Sequence[type]) -> str:
    entries = [entry for cls in classes for entry in entries_of(cls).values()]
    if not entries:
        return f"unknown setting {shown(key)}; there are no settings here"
    known = dict.fromkeys(spelling for entry in entries for spelling in (entry.name, *entry.constraints.aliases))
    near = nearest_spelling(key, known)
    return f"unknown setting {shown(key)}{near or '; known: ' + ', '.join(known)}"


def settings_from_mapping(
    cls: type[S], mapping: Mapping[Any, Any] | None, *, where: str, defaults: S | None = None
) -> S:
    """An instance of the settings class `cls` with the values of `mapping`, and else those of `defaults`.

    Args:
        mapping: key (name, alias or former name) -> value; None is an empty block of YAML.
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
