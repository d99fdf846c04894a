"""Command-line flags for the settings of the engine and of every operator, including the user's operators."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hetero_kv.errors import ConfigError
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.owners import Owner, flat_classes, registered_owners
from hetero_kv.rules.precedence import COMMAND_LINE
from hetero_kv.rules.recipes import DEFAULT_RECIPE
from hetero_kv.rules.setting_groups import setting_groups
from hetero_kv.rules.trust import add_trust_flag, trusted_modules
from hetero_kv.settings.description import takes_any_text
from hetero_kv.settings.flags import FlagParser
from hetero_kv.settings.mapping import canonical

#: The attribute of the parsed flags that contains the settings.
SETTINGS_DEST = "long_context"


def add_rules_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag `--config`, which names one rules file."""
    group.add_argument(
        "--config",
        "--optimize_config_path",
        dest="rules",
        default=DEFAULT_RECIPE,
        metavar="FILE",
        help="rules file, or a recipe's name, optionally with settings: quest:block_size=32 "
        f"(default {DEFAULT_RECIPE})",
    )


def add_setting_flags(parser: FlagParser, configs: Callable[[argparse.Namespace], Iterable[str]]) -> None:
    """Add a flag for every setting, and the flag for trusted modules.

    A name that the command already uses stays the command's.

    Args:
        configs: returns the rules' names in the parsed flags; their operators may add further settings.
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
    """The settings among the flags, by canonical key.

    Raises:
        ConfigError: a value of the wrong type or out of range, or one setting under two names.
    """
    settings: Mapping[str, Any] = getattr(flags, SETTINGS_DEST)
    return canonical(flat_classes(flags.owners), settings, where=COMMAND_LINE)


def _add(parser: FlagParser, owners: Sequence[Owner]) -> None:
    classes = flat_classes(owners)
    for title, settings in setting_groups(owners):
        missing = [each for each in settings if not parser.has(f"--{each.row.name}")]
        if missing:
            group = parser.add_argument_group(title)
            for each in missing:
                is_text = takes_any_text(classes, each.row.name)
                parser.add_setting(group, SETTINGS_DEST, each.row, each.meaning(owners), is_text=is_text)
    parser.set_defaults(owners=owners)


def _of_rules(flags: argparse.Namespace, configs: Iterable[str]) -> list[Owner]:
    """The known owners of these rules. Unreadable rules are skipped; the command reports them when it loads them."""
    found: list[Owner] = []
    for word in configs:
        try:
            found += named_config(word, trusted_modules(flags)).rules.known_owners()
        except ConfigError:
            continue
    return found
