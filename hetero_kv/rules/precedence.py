"""Resolves the value of a setting and its source. Only this module knows the order of the sources.

Highest first: the command line; a rule's kwargs; the kwargs of the rules that it starts from; the `long_context:` of
the rules file; the `long_context:` of the files that it extends; the settings file; the field's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hetero_kv.errors import ConfigError
from hetero_kv.settings.description import setting_names
from hetero_kv.settings.mapping import canonical, settings_from_mapping
from hetero_kv.settings.setting import entry_of

COMMAND_LINE = "command line"
SETTINGS_FILE = "settings file"
DEFAULT = "default"

S = TypeVar("S")


@dataclass(frozen=True)
class SettingsSource:
    """The settings from one source.

    Attributes:
        source: the source as messages call it: "command line", "mine.yaml: rule 2", "quest.yaml: long_context".
        settings: by canonical key (`mapping.canonical`).
        is_strict: whether the source sets them for this operator. If not, values that are invalid for it are skipped.
    """

    source: str
    settings: Mapping[str, Any]
    is_strict: bool = True


@dataclass(frozen=True)
class InForce(Generic[S]):
    """Settings in force.

    Attributes:
        sources: setting -> the source of its value, or `DEFAULT`.
    """

    settings: S
    sources: dict[str, str]


def before(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of both, by canonical key; `first` wins where both set the same one, under whichever key."""
    return {**first, **{key: value for key, value in then.items() if key not in first}}


def value_of(name: str, by_precedence: Sequence[SettingsSource]) -> Any:
    """The value of one setting in the first of `by_precedence` that sets it; None if none does."""
    return next((one.settings[name] for one in by_precedence if name in one.settings), None)


def in_force(cls: type[S], by_precedence: Sequence[SettingsSource], *, where: str) -> InForce[S]:
    """The settings `cls` from `by_precedence`, highest first; keys that `cls` lacks are ignored.

    Raises:
        ConfigError: an invalid value, named with its source, or values that exclude each other, named with `where` and
            the command line's settings.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(setting_names(cls), DEFAULT)
    for one in by_precedence:
        for key, value in one.settings.items():
            entry = entry_of(cls, key)
            if entry is None or entry.name in values:
                continue
            try:
                values |= canonical((cls,), {key: value}, where=one.source)
            except ConfigError:
                if one.is_strict:
                    raise
                continue
            sources[entry.name] = one.source
    # The file alone may be valid, so the error names the flags too.
    flags = [f"{name} {values[name]}" for name, source in sources.items() if source == COMMAND_LINE]
    if flags:
        where = f"{where}, with {', '.join(flags)} from the command line"
    return InForce(settings_from_mapping(cls, values, where=where), sources)
