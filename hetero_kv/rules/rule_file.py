"""Reading rules: YAML, with what it extends, checked before any model is touched.

After KTransformers' rule files: a rule matches modules by name and class, the first rule that matches a module wins.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero_kv import operators
from hetero_kv.adapter.operator import Operator
from hetero_kv.errors import ConfigError
from hetero_kv.rules import recipes
from hetero_kv.rules.owners import flat_classes, owners_of, registered_owners
from hetero_kv.rules.rule_set import Rule, RuleFile, RuleSet
from hetero_kv.settings.located_yaml import LocatedMapping, located, parse_yaml, read_yaml
from hetero_kv.settings.setting import canonical, nearest_spelling


def load_rules(path: str | Path) -> RuleSet:
    """The rules in the file at `path`, or in the packaged recipe of that name ("quest", "injection_rules/quest.yaml").

    Raises:
        ConfigError: no such file, or a mistake in it or in a file it extends; it names file, line, rule and key.
    """
    found = recipes.find(str(path), Path())
    if found is None:
        near = nearest_spelling(Path(path).stem, recipes.names())
        raise ConfigError(
            f"there is no rules file {str(path)!r}{near}; give a path, or a recipe: {', '.join(recipes.names())}"
        )
    return _with_rules(_load(found, recipes.display(found), chain=(), loaded={}), recipes.display(found))


def parse_rules(text_or_object: str | Mapping[str, Any] | list[Any], source: str = "rules") -> RuleSet:
    """Rules from YAML text, or from the mapping or list it would be; `extends` is relative to the working directory.

    Args:
        source: names the rules in errors.

    Raises:
        ConfigError: as `load_rules`.
    """
    document = parse_yaml(text_or_object, source) if isinstance(text_or_object, str) else text_or_object
    return _with_rules(_rule_set(document, source, None, chain=(), loaded={}), source)


def _with_rules(rule_set: RuleSet, source: str) -> RuleSet:
    if not rule_set.rules:
        raise ConfigError(f"{source}: no rules; give `rules:`, or `extends: ktransformers.yaml`")
    return rule_set


def _load(path: Path, source: str, chain: tuple[Path, ...], loaded: dict[Path, RuleFile]) -> RuleSet:
    path = path.resolve()
    if path in chain:
        links = " -> ".join(recipes.display(link) for link in (*chain[chain.index(path) :], path))
        raise ConfigError(f"{recipes.display(chain[-1])}: extends: circular: {links}; take one of these out")
    if path in loaded:
        return RuleSet(path, loaded[path], ())
    found = _rule_set(read_yaml(path, source), source, path, (*chain, path), loaded)
    loaded[path] = found.file
    return found


def _rule_set(
    document: Any, source: str, path: Path | None, chain: tuple[Path, ...], loaded: dict[Path, RuleFile]
) -> RuleSet:
    if isinstance(document, list):
        document = {"rules": document}
    document = _mapping(document, source, ("extends", "long_context", "rules"), "the file")
    listed = document.get("rules") or []
    if not isinstance(listed, list):
        raise ConfigError(f"{located(source, document, 'rules')}: rules is {listed!r}; it must be a list of rules")
    own = [_rule(content, f"{source}: rule {number}") for number, content in enumerate(listed, start=1)]
    parents = [_load(each, recipes.display(each), chain, loaded) for each in _parents(document, source, path)]
    inherited = [rule for parent in parents for rule in parent.rules]
    owners = registered_owners(rule.operator for rule in (*own, *inherited) if rule.operator)
    long_context = _settings(document.get("long_context"), flat_classes(owners), f"{source}: long_context")
    extends = dict.fromkeys(file for parent in parents for file in (parent.file, *parent.file.extends))
    file = RuleFile(source, long_context, tuple(extends))
    return RuleSet(path, file, (*(replace(rule, file=file) for rule in own), *inherited))


def _settings(block: Any, classes: Sequence[type], where: str) -> dict[str, Any]:
    """The settings of a block under their own names, with the lines that they stand on."""
    settings = canonical(classes, block, where=where)
    if not isinstance(block, LocatedMapping):
        return settings
    kept = LocatedMapping(block.line)
    kept.update(settings)
    kept.key_lines = {
        name: block.key_lines[key] for name, key in zip(settings, block, strict=True) if key in block.key_lines
    }
    return kept


def _parents(document: Mapping[str, Any], source: str, path: Path | None) -> list[Path]:
    extends = document.get("extends") or []
    names = [extends] if isinstance(extends, str) else extends
    where = f"{located(source, document, 'extends')}: extends"
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where} is {extends!r}; it must be a file name or a list of file names")
    parents = []
    for name in names:
        found = recipes.find(name, path.parent if path else Path())
        if found is None:
            folder = f"beside {source} " if path else ""
            near = nearest_spelling(Path(name).stem, recipes.names())
            raise ConfigError(
                f"{where}: there is no {name!r} {folder}or in the package{near}; packaged: {', '.join(recipes.names())}"
            )
        parents.append(found)
    return parents


def _rule(content: Any, source: str) -> Rule:
    content = _mapping(content, source, ("match", "replace", "recursive"), "a rule")
    for required in ("match", "replace"):
        if required not in content:
            raise ConfigError(f"{located(source, content)}: no {required!r}; a rule needs match and replace")
    match = _mapping(content["match"], f"{source}: match", ("name", "class"), "match")
    for key in match:
        if not isinstance(match[key], str) or not match[key]:
            raise ConfigError(f"{located(f'{source}: match', match, key)}: {key} is {match[key]!r}; it must be text")
    if not match:
        raise ConfigError(f"{located(f'{source}: match', content, 'match')}: give name, class, or both")
    recursive = content.get("recursive", True)
    if not isinstance(recursive, bool):
        raise ConfigError(
            f"{located(source, content, 'recursive')}: recursive is {recursive!r}; it must be true or false"
        )
    replace_with = _mapping(content["replace"], f"{source}: replace", ("class", "kwargs"), "replace")
    where = located(f"{source}: replace", replace_with, "class")
    operator_name = replace_with.get("class")
    if not isinstance(operator_name, str) or not operator_name:
        raise ConfigError(f"{where}: class is {operator_name!r}; it must be an operator's name, or default")
    operator = None if operator_name == "default" else _operator(operator_name, where)
    rule = Rule(source, _pattern(match, source), match.get("class"), operator, operator_name, recursive=recursive)
    kwargs = replace_with.get("kwargs")
    classes = [owner.settings for owner in owners_of(operator, _choice(operator, kwargs))] if operator else []
    return replace(rule, kwargs=_settings(kwargs, classes, f"{rule.title}: kwargs"))


def _choice(operator: type[Operator], kwargs: Any) -> str | None:
    """What `kwargs` choose among the operator's settings, if they do."""
    chosen = kwargs.get(operator.chosen_by) if isinstance(kwargs, Mapping) and operator.chosen_by else None
    return chosen if isinstance(chosen, str) else None


def _pattern(match: Mapping[str, str], source: str) -> re.Pattern[str] | None:
    if "name" not in match:
        return None
    try:
        return re.compile(match["name"])
    except re.error as error:
        where = located(f"{source}: match", match, "name")
        # Not as repr, which would double the backslashes the user wrote.
        raise ConfigError(f"{where}: name '{match['name']}' is not a regular expression: {error}") from error


def _operator(name: str, where: str) -> type[Operator]:
    """The operator class called `name`: a dotted path, or a name in `hetero_kv.operators`."""
    package, _, short = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(package) if package else operators, short)
    except Exception as error:  # the user's own module may raise anything while it is imported
        raise ConfigError(f"{where}: class {name!r} cannot be imported ({error}){_nearest_operator(name)}") from error
    if not _is_operator(found):
        required = f"{Operator.__module__}.{Operator.__qualname__}"
        raise ConfigError(
            f"{where}: class {name!r} is not an operator; name a subclass of {required}{_nearest_operator(name)}"
        )
    return found


def _is_operator(thing: object) -> bool:
    if not (isinstance(thing, type) and issubclass(thing, Operator)) or thing is Operator:
        return False
    return not any(getattr(getattr(thing, name, None), "__isabstractmethod__", False) for name in dir(thing))


def _nearest_operator(name: str) -> str:
    known = [key for key, thing in vars(operators).items() if _is_operator(thing)]
    spellings = ["default", *(f"{operators.__name__}.{key}" for key in known)] if "." in name else ["default", *known]
    return nearest_spelling(name, spellings) or f"; known: {', '.join(spellings)}"


def _mapping(value: Any, where: str, keys: tuple[str, ...], what: str) -> Mapping[str, Any]:
    """`value`, if it is a mapping with none but these keys."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {what} is {value!r}; it must be a mapping with the keys {', '.join(keys)}")
    for key in value:
        if key not in keys:
            near = nearest_spelling(key, keys) or f"; known: {', '.join(keys)}"
            raise ConfigError(f"{located(where, value, key)}: unknown key {key!r}{near}")
    return value


def nearest_module_paths(pattern: str | re.Pattern[str], paths: Iterable[str], limit: int = 3) -> list[str]:
    """Of a model's module paths, those that look most like what a pattern that matches none of them was meant for.

    Layer numbers count as equal, and of paths that differ in nothing else the first stands for all.
    """
    text = pattern if isinstance(pattern, str) else pattern.pattern
    # `\d+` and its kin stand for a number, `\.` for a dot; what is left of the syntax is not part of any path.
    wanted = re.sub(r"\\d[+*]?|\[0-9\][+*]?|\.[+*]\??|\d+", "0", text).replace("\\.", ".")
    wanted = re.sub(r"\(\^\|\.\)|[\\^$()?*+\[\]]", "", wanted)
    shapes: dict[str, str] = {}
    for path in paths:
        shapes.setdefault(re.sub(r"\d+", "0", path), path)
    return [shapes[shape] for shape in difflib.get_close_matches(wanted, shapes, n=limit, cutoff=0.5)]
