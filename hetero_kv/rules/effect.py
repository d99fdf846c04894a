"""Refuses settings that no injected operator reads; the error says which operators have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetero_kv.errors import ConfigError
from hetero_kv.rules.owners import Owner, flat_classes, labels
from hetero_kv.rules.precedence import COMMAND_LINE, InForce
from hetero_kv.settings.description import setting_names
from hetero_kv.settings.located_yaml import located
from hetero_kv.settings.mapping import canonical
from hetero_kv.settings.setting import entry_of


def require_effect(
    settings: Mapping[str, Any], in_place: Sequence[Owner], known: Sequence[Owner], *, where: str, rules: str
) -> None:
    """Raise ConfigError for the first of `settings` that neither the engine nor an injected operator has.

    Args:
        settings: by canonical key; for settings from YAML the error names the line.
        in_place: the owners of the settings of injected operators.
        known: all owners; the error lists those that have the setting.
        where: the place that the error names.
        rules: the rules as messages call them.
    """
    taken = taken_by(settings, in_place)
    for key in settings:
        if key not in taken:
            place = located(where, settings, key)
            raise ConfigError(f"{place}: {_without_effect(key, in_place, known, rules)}")


def require_precedence(settings: Mapping[str, Any], file: str, in_force: Iterable[InForce[Any]]) -> None:
    """Raise ConfigError for a `long_context:` setting of a file that other files' kwargs override in every operator.

    Args:
        settings: the file's `long_context:` settings by canonical key.
        file: the file's name. Overrides by its own rules are allowed, since its author sees them.
        in_force: the settings in force of every injected operator.
    """
    distinct = {id(each): each for each in in_force}.values()
    for key, value in settings.items():
        takers = [
            (each, entry.name)
            for each in distinct
            if each.settings is not None and (entry := entry_of(type(each.settings), key))
        ]
        sources = sorted({each.sources[name] for each, name in takers})
        is_intended = any(source == COMMAND_LINE or source.startswith(f"{file}: ") for source in sources)
        if takers and not is_intended and all(getattr(each.settings, name) != value for each, name in takers):
            place, name = located(f"{file}: long_context", settings, key), takers[0][1]
            raise ConfigError(
                f"{place}: {name} has no effect here: kwargs win, and {', '.join(sources)} sets it; set it in the "
                "kwargs of a rule in this file, or as a flag"
            )


def _without_effect(key: str, in_place: Sequence[Owner], known: Sequence[Owner], rules: str) -> str:
    name = next((entry.name for cls in flat_classes(known) if (entry := entry_of(cls, key))), key)
    takers = [owner for owner in known if entry_of(owner.settings, key)]
    with_settings = [owner for owner in in_place if setting_names(owner.settings)]
    instead = f"injects {labels(with_settings, known)}" if with_settings else "injects no operator with settings"
    meaning = f"it is a setting of {labels(takers, known)}, and" if takers else "no operator has such a setting;"
    # The operators in place have a setting of that name, which `key` never meant.
    if any(name in setting_names(owner.settings) for owner in in_place):
        meaning = f"it is the former name of {name} in {labels(takers, known)} alone, and"
        name, instead = key, f"{instead}; write {name}"
    return f"{name} has no effect here: {meaning} {rules} {instead}"


def with_effect(
    mapping: Mapping[Any, Any] | None, in_place: Sequence[Owner], known: Sequence[Owner], *, where: str, rules: str
) -> dict[str, Any]:
    """The settings in `mapping` by canonical key, validated by the injected operators' dataclasses.

    Raises:
        ConfigError: what `canonical` refuses, and a setting that no injected operator has (see `require_effect`).
    """
    checked = canonical(flat_classes((*in_place, *known)), mapping, where=where)
    require_effect(checked, in_place, known, where=where, rules=rules)
    # A value that is valid only for other owners is an error here.
    return canonical(flat_classes(in_place), mapping, where=where)


def taken_by(settings: Mapping[str, Any], owners: Sequence[Owner]) -> dict[str, Any]:
    """The subset of `settings` that the engine or one of the owners has."""
    classes = flat_classes(owners)
    return {key: value for key, value in settings.items() if any(entry_of(cls, key) for cls in classes)}
