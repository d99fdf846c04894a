"""What `--config` names: rules files, each with settings of its own where wanted: `quest:second_block_count=64`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_kv.errors import ConfigError
from hetero_kv.rules.injection import Injection
from hetero_kv.rules.precedence import ALL_LONG_CONTEXT
from hetero_kv.rules.recipes import display
from hetero_kv.rules.rule_file import RuleSet, load_rules
from hetero_kv.settings.flags import scalar
from hetero_kv.settings.setting import canonical

BASELINE = "full"


@dataclass(frozen=True)
class ConfigSpec:
    """A method: rules, and settings that win over them.

    Attributes:
        name: what results and tables call it.
        settings: under their own names.
    """

    name: str
    rules: RuleSet
    settings: dict[str, Any]


def config_specs(words: Sequence[str]) -> list[ConfigSpec]:
    """The methods that `words` name, each `FILE` or `FILE:setting=value:setting=value`.

    A method is called as its file is, without folder and suffix, and with its settings.

    Raises:
        ConfigError: a file that is not there or has mistakes, an unknown setting or value, or two methods of one name.
    """
    specs: dict[str, ConfigSpec] = {}
    for word in words:
        file, *assignments = word.split(":")
        name = ":".join((Path(file).stem, *assignments))
        if name == BASELINE:
            raise ConfigError(f"config {word!r}: {BASELINE!r} is what the untouched model is called; rename the file")
        if name in specs:
            raise ConfigError(f"config {word!r}: there are two methods called {name!r}; keep one, or rename its file")
        rules = load_rules(file)
        specs[name] = ConfigSpec(name, rules, _settings(assignments, rules, f"config {word!r}"))
    return list(specs.values())


def settings_in_force(spec: ConfigSpec, injection: Injection) -> dict[str, Any]:
    """A method as plain data, operators of equal settings taken together; nothing that depends on the machine."""
    operators: list[dict[str, Any]] = []
    for path, (name, settings) in injection.report().items():
        values = None if settings is None else asdict(settings)  # type: ignore[call-overload]
        same = next((o for o in operators if o["operator"] == name and o["settings"] == values), None)
        if same is None:
            operators.append({"operator": name, "settings": values, "modules": [path]})
        else:
            same["modules"].append(path)
    engine = asdict(injection.engine)
    del engine["threads_num"]
    rules = display(spec.rules.path) if spec.rules.path else "rules"
    return {"rules": rules, "engine": engine, "operators": operators}


def _settings(assignments: Sequence[str], rules: RuleSet, where: str) -> dict[str, Any]:
    mapping = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"{where}: {assignment!r} is no setting; write FILE:setting=value")
        mapping[key] = scalar(value)
    used = (rule.operator.settings_class_for(rule.kwargs) for rule in rules.rules if rule.operator)
    return canonical((*ALL_LONG_CONTEXT, *(cls for cls in used if cls)), mapping, where=where)
