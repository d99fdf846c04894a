"""Parses the value of `--config`: a rules file, optionally with settings, as in `quest:block_size=32`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_kv.errors import ConfigError
from hetero_kv.rules import recipes
from hetero_kv.rules.owners import flat_classes
from hetero_kv.rules.precedence import COMMAND_LINE, before
from hetero_kv.rules.rule_file import load_rules
from hetero_kv.rules.rule_set import RuleSet
from hetero_kv.settings.description import takes_any_text
from hetero_kv.settings.flags import scalar

# A value may contain colons; a setting begins with a name and an equals sign.
_BEFORE_SETTING = re.compile(r":(?=[A-Za-z][\w-]*=)")


@dataclass(frozen=True)
class NamedConfig:
    """Rules, and settings that win over them.

    Attributes:
        name: the file without folder and suffix, and its settings as written.
        settings: by canonical key.
    """

    name: str
    rules: RuleSet
    settings: dict[str, Any]

    def command_line(self, flags: Mapping[Any, Any]) -> dict[str, Any]:
        """The settings that win over the rules: `flags`, overridden by the settings in the name.

        Raises:
            ConfigError: an unknown setting, a wrong value, or a setting that no operator of the rules has.
        """
        return before(self.settings, self.rules.with_effect(flags, where=COMMAND_LINE, override=self.settings))


def named_config(word: str, trust_rules: Collection[str] = ()) -> NamedConfig:
    """The rules and settings of `word`: `FILE` or `FILE:setting=value:setting=value`.

    Args:
        trust_rules: see `load_rules`.

    Raises:
        ConfigError: a missing or faulty file, an unknown setting or value, or a setting that no operator of the rules
            has.
    """
    file, assignments = _cut(word)
    rules = load_rules(file, trust_rules)
    rules.require_own_effect()
    where = f"config {word!r}"
    classes = flat_classes(rules.known_owners())
    settings: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"{where}: {assignment!r} is not a setting; write FILE:setting=value")
        settings[key] = value if takes_any_text(classes, key) else scalar(value)
    name = ":".join((Path(file).stem, *assignments))
    return NamedConfig(name, rules, rules.with_effect(settings, where=where))


def config_in(config: RuleSet | NamedConfig | str | Path, trust_rules: Collection[str] = ()) -> NamedConfig:
    """The NamedConfig of what a Python caller passes: parsed rules, or a word for `named_config`.

    Raises ConfigError as `named_config`.
    """
    if isinstance(config, NamedConfig):
        return config
    if isinstance(config, RuleSet):
        return NamedConfig(config.file.name, config, {})
    return named_config(str(config), trust_rules)


def _cut(word: str) -> tuple[str, list[str]]:
    """Splits `word` into the file name and the assignments after it."""
    if recipes.find(word, Path()) is not None:
        return word, []
    named, *assignments = _BEFORE_SETTING.split(word)
    if recipes.find(named, Path()) is not None:
        return named, assignments
    file, *stray = named.split(":")
    return file, [*stray, *assignments]
