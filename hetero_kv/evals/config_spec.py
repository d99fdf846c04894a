"""The methods of a run: the names in `--config`, and the run's settings that each method takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hetero_kv.errors import ConfigError
from hetero_kv.evals.options import parse_list
from hetero_kv.rules.effect import require_effect, taken_by
from hetero_kv.rules.named_config import NamedConfig, named_config
from hetero_kv.rules.owners import flat_classes, registered_owners
from hetero_kv.rules.precedence import COMMAND_LINE, before
from hetero_kv.rules.recipes import display
from hetero_kv.settings.description import oldest_names
from hetero_kv.settings.mapping import canonical

if TYPE_CHECKING:
    from hetero_kv.rules.injection import Injection

BASELINE = "full"


#: A method: the rules that `--config` names, and its name in results and tables.
ConfigSpec = NamedConfig


def config_words(text: str | None) -> tuple[str, ...]:
    """The methods in a comma-separated list; a number after a setting's value continues that value's list.

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

    A method's name is its file's name, without folder and suffix, followed by its settings.

    Args:
        trust_rules: see `load_rules`.

    Raises:
        ConfigError: a missing or faulty file, an unknown setting or value, a setting that the method does not take, or
            two methods of one name.
    """
    specs: dict[str, ConfigSpec] = {}
    for word in words:
        spec = named_config(word, trust_rules)
        if spec.name == BASELINE:
            raise ConfigError(f"config {word!r}: {BASELINE!r} is the name of the untouched model; rename the file")
        if spec.name in specs:
            raise ConfigError(
                f"config {word!r}: there are two methods called {spec.name!r}; keep one, or rename its file"
            )
        specs[spec.name] = spec
    return list(specs.values())


def require_effect_somewhere(settings: Mapping[str, Any], specs: Sequence[ConfigSpec]) -> None:
    """Raise ConfigError if one of the `settings` for all methods has no effect in any of them."""
    known = registered_owners(rule.declaration for spec in specs for rule in spec.rules.rules if rule.declaration)
    in_place = [owner for spec in specs for owner in spec.rules.owners({**settings, **spec.settings})]
    rules = ", ".join(spec.rules.file.name for spec in specs) or "the untouched model"
    require_effect(settings, list(dict.fromkeys(in_place)), known, where=COMMAND_LINE, rules=rules)


def settings_for(spec: ConfigSpec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that override a method's rules: those of the run that it takes, overridden by the method's own."""
    taken = taken_by(settings, spec.rules.owners({**settings, **spec.settings}))
    classes = flat_classes(spec.rules.known_owners())
    return before(spec.settings, canonical(classes, taken, where=COMMAND_LINE))


def settings_in_force(spec: ConfigSpec, injection: Injection) -> dict[str, Any]:
    """A method as plain data, operators grouped by settings; independent of the machine.

    A renamed setting has its oldest name, so that a run recorded under it can continue.
    """
    operators: list[dict[str, Any]] = []
    for path, (name, settings) in injection.report().items():
        values = None if settings is None else _recorded(settings)
        same = next((o for o in operators if o["operator"] == name and o["settings"] == values), None)
        if same is None:
            operators.append({"operator": name, "settings": values, "modules": [path]})
        else:
            same["modules"].append(path)
    engine = _recorded(injection.engine)
    del engine["threads_num"]
    engine["attend_on"] = injection.place.setting
    rules = display(spec.rules.path) if spec.rules.path else "rules"
    return {"rules": rules, "engine": engine, "operators": operators}


def _recorded(settings: Any) -> dict[str, Any]:
    oldest = oldest_names(type(settings))
    return {oldest.get(name, name): value for name, value in asdict(settings).items()}
