"""Flags for the settings of the engine and of every operator, those of the user's own operators included."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hetero_kv.errors import ConfigError
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.owners import Owner, flat_classes, registered_owners
from hetero_kv.rules.precedence import COMMAND_LINE
from hetero_kv.rules.setting_groups import setting_groups
from hetero_kv.rules.trust import add_trust_flag, trusted_modules
from hetero_kv.settings.description import takes_any_text
from hetero_kv.settings.flags import FlagParser
from hetero_kv.settings.mapping import canonical

#: Where the parsed flags hold the settings.
SETTINGS_DEST = "long_context"


def add_setting_flags(parser: FlagParser, configs: Callable[[argparse.Namespace], Iterable[str]]) -> None:
    """Add a flag for every setting, after the command's own: a name that is one of those stays the command's.

    With them comes the flag for the modules that rules may name operators of.

    Args:
        configs: of the parsed flags, the words that name rules; the operators of these may have settings of their own.
    """
    add_trust_flag(parser)
    registered = registered_owners()
    _add(parser, registered)

    def learn(flags: argparse.Namespace) -> bool:
        owners = list(dict.fromkeys([*registered, *_of_rules(flags, configs(flags))]))
        _add(parser, owners)
        return len(owners) > len(registered)

    parser.learn = learn


def settings_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags, under their own names.

    Raises:
        ConfigError: a value of the wrong type or out of range, or a setting given under two names.
    """
    given: Mapping[str, Any] = getattr(flags, SETTINGS_DEST)
    return canonical(flat_classes(flags.owners), given, where=COMMAND_LINE)


def _add(parser: FlagParser, owners: Sequence[Owner]) -> None:
    classes = flat_classes(owners)
    for title, settings in setting_groups(owners):
        wanted = [each for each in settings if not parser.has(f"--{each.row.name}")]
        if wanted:
            group = parser.add_argument_group(title)
            for each in wanted:
                is_text = takes_any_text(classes, each.row.name)
                parser.add_setting(group, SETTINGS_DEST, each.row, each.meaning(owners), is_text=is_text)
    parser.set_defaults(owners=owners)


def _of_rules(flags: argparse.Namespace, configs: Iterable[str]) -> list[Owner]:
    """The owners that the rules of these names know; none of what cannot be read, which is told when it is used."""
    found: list[Owner] = []
    for word in configs:
        try:
            found += named_config(word, trusted_modules(flags)).rules.known_owners()
        except ConfigError:
            continue
    return found
