"""The methods of a run: what `--config` names, and which of the run's settings each of them takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hetero_kv.errors import ConfigError
from hetero_kv.evals.options import parse_list
from hetero_kv.rules.effect import require_effect, taken_by
from hetero_kv.rules.injection import Injection
from hetero_kv.rules.named_config import NamedConfig, named_config
from hetero_kv.rules.owners import registered_owners
from hetero_kv.rules.precedence import COMMAND_LINE
from hetero_kv.rules.recipes import display

BASELINE = "full"


#: A method: what `--config` names, and what results and tables call it.
ConfigSpec = NamedConfig


def config_words(text: str | None) -> tuple[str, ...]:
    """The methods that a list written with commas names; a number behind a setting's value goes on with its list.

    Raises ConfigError for an empty item.
    """
    words: list[str] = []
    for word in parse_list(text, str, "config") if text else ():
        if words and "=" in words[-1] and word.isdecimal():
            words[-1] += f",{word}"
        else:
            words.append(word)
    return tuple(words)


def config_specs(words: Sequence[str], trust_rules: Collection[str] = ()) -> list[ConfigSpec]:
    """The methods that `words` name, each `FILE` or `FILE:setting=value:setting=value`.

    A method is called as its file is, without folder and suffix, and with its settings.

    Args:
        trust_rules: as `load_rules` has them.

    Raises:
        ConfigError: a file that is not there or has mistakes, an unknown setting or value, one that the method does not
            take, or two methods of one name.
    """
    specs: dict[str, ConfigSpec] = {}
    for word in words:
        spec = named_config(word, trust_rules)
        if spec.name == BASELINE:
            raise ConfigError(f"config {word!r}: {BASELINE!r} is what the untouched model is called; rename the file")
        if spec.name in specs:
            raise ConfigError(
                f"config {word!r}: there are two methods called {spec.name!r}; keep one, or rename its file"
            )
        specs[spec.name] = spec
    return list(specs.values())


def require_effect_somewhere(settings: Mapping[str, Any], specs: Sequence[ConfigSpec]) -> None:
    """Raise ConfigError for one of the `settings` given for all methods that none of them takes."""
    known = registered_owners(rule.operator for spec in specs for rule in spec.rules.rules if rule.operator)
    in_place = [owner for spec in specs for owner in spec.rules.owners({**settings, **spec.settings})]
    rules = ", ".join(spec.rules.file.name for spec in specs) or "the untouched model"
    require_effect(settings, list(dict.fromkeys(in_place)), known, where=COMMAND_LINE, rules=rules)


def settings_for(spec: ConfigSpec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What wins over a method's rules: of the `settings` for all methods those that it takes, and its own over them."""
    return taken_by(settings, spec.rules.owners({**settings, **spec.settings})) | spec.settings


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
