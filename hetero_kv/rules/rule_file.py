"""Reads rules from YAML, with the files that they extend, and checks them before any model is changed.

The format follows KTransformers: a rule matches modules by name and class, and a module's first matching rule wins.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetero_kv.errors import ConfigError, shown
from hetero_kv.rules import recipes
from hetero_kv.rules.module_pattern import ModulePattern, SearchTime
from hetero_kv.rules.operator_names import named_operator
from hetero_kv.rules.owners import flat_classes, owners_of, registered_owners
from hetero_kv.rules.rule_set import Rule, RuleFile, RuleSet
from hetero_kv.rules.trusted_names import trusted_names
from hetero_kv.settings.declaration import OperatorDeclaration
from hetero_kv.settings.located_yaml import LocatedMapping, located, parse_yaml, read_yaml
from hetero_kv.settings.mapping import canonical
from hetero_kv.settings.setting import nearest_spelling

MOST_RULES = 1000
"""Limit on the rules of a file."""
MOST_EXTENDED = 32
"""Limit on the files that one file extends, and on the total."""
SUFFIXES = (".yaml", ".yml")
"""Suffixes that an extended file may have."""

_TOP_LEVEL = ("extends", "long_context", "rules")


def load_rules(path: str | Path, trust_rules: Collection[str] = ()) -> RuleSet:
    """The rules in the file at `path`, or in the packaged recipe of that name ("quest", "injection_rules/quest.yaml").

    Args:
        trust_rules: user modules whose operators the rules may name; no other user module is imported.

    Raises:
        ConfigError: no such file, or a mistake in it or in a file it extends; it names file, line, rule and key.
    """
    found = recipes.find(str(path), Path())
    if found is None:
        near = nearest_spelling(Path(path).stem, recipes.names())
        raise ConfigError(
            f"there is no rules file {str(path)!r}{near}; give a path, or a recipe: {', '.join(recipes.names())}"
        )
    return _with_rules(
        _load(found, _Reading(recipes.display(found), trusted_names(trust_rules, "load_rules"))), recipes.display(found)
    )


def parse_rules(
    text_or_object: str | Mapping[str, Any] | list[Any], source: str = "rules", trust_rules: Collection[str] = ()
) -> RuleSet:
    """Rules from YAML text, or from a parsed mapping or list; `extends` is relative to the working directory.

    Args:
        source: names the rules in errors.
        trust_rules: see `load_rules`.

    Raises:
        ConfigError: as `load_rules`.
    """
    document = parse_yaml(text_or_object, source) if isinstance(text_or_object, str) else text_or_object
    return _with_rules(_rule_set(document, None, _Reading(source, trusted_names(trust_rules, "parse_rules"))), source)


@dataclass(frozen=True)
class _Reading:
    """The state of reading one file of a rule set.

    Attributes:
        source: the file as messages call it.
        trusted: modules whose operators may be named.
        chain: the files that extend one another from the first to this one.
        loaded: the files that are read completely.
        search_time: the time budget for the patterns of all files.
    """

    source: str
    trusted: tuple[str, ...]
    chain: tuple[Path, ...] = ()
    loaded: dict[Path, RuleFile] = field(default_factory=dict)
    search_time: SearchTime = field(default_factory=SearchTime)

    def of_parent(self, path: Path) -> _Reading:
        return replace(self, source=recipes.display(path))


def _with_rules(rule_set: RuleSet, source: str) -> RuleSet:
    if not rule_set.rules:
        raise ConfigError(f"{source}: no rules; give `rules:`, or `extends: ktransformers.yaml`")
    return rule_set


def _load(path: Path, reading: _Reading) -> RuleSet:
    path, chain, loaded = path.resolve(), reading.chain, reading.loaded
    if path in chain:
        links = " -> ".join(recipes.display(link) for link in (*chain[chain.index(path) :], path))
        raise ConfigError(f"{recipes.display(chain[-1])}: extends: circular: {links}; remove one of these")
    if path in loaded:
        return RuleSet(path, loaded[path], ())
    if len(loaded) + len(chain) >= MOST_EXTENDED:
        raise ConfigError(
            f"{recipes.display(chain[-1])}: extends: more than {MOST_EXTENDED} files in total; leave some out"
        )
    found = _rule_set(read_yaml(path, reading.source), path, replace(reading, chain=(*chain, path)))
    loaded[path] = found.file
    return found


def _rule_set(document: Any, path: Path | None, reading: _Reading) -> RuleSet:
    source = reading.source
    # The user chose the first file; an extended one may be any file, so the error shows none of its content.
    if len(reading.chain) > 1 and not _may_be_rules(document):
        raise ConfigError(f"{source}: an extended file must have rules; give one with {', '.join(_TOP_LEVEL)}")
    if isinstance(document, list):
        document = {"rules": document}
    document = _mapping(document, source, _TOP_LEVEL, "the file")
    listed = document.get("rules") or []
    if not isinstance(listed, list):
        raise ConfigError(f"{located(source, document, 'rules')}: rules is {shown(listed)}; it must be a list of rules")
    if len(listed) > MOST_RULES:
        raise ConfigError(
            f"{source}: {len(listed):,} rules; a file may have {MOST_RULES:,}: let one rule match several modules"
        )
    own = [_rule(each, f"{source}: rule {number}", reading) for number, each in enumerate(listed, start=1)]
    parents = [_load(each, reading.of_parent(each)) for each in _parents(document, source, path)]
    inherited = [rule for parent in parents for rule in parent.rules]
    owners = registered_owners(rule.declaration for rule in (*own, *inherited) if rule.declaration)
    long_context = _settings(document.get("long_context"), flat_classes(owners), f"{source}: long_context")
    extends = dict.fromkeys(file for parent in parents for file in (parent.file, *parent.file.extends))
    file = RuleFile(source, long_context, tuple(extends))
    return RuleSet(path, file, (*(replace(rule, file=file) for rule in own), *inherited))


def _may_be_rules(document: Any) -> bool:
    return isinstance(document, Mapping) or (
        isinstance(document, list) and all(isinstance(each, Mapping) for each in document)
    )


def _settings(block: Any, classes: Sequence[type], where: str) -> dict[str, Any]:
    """The settings of a block by canonical key, with their line numbers."""
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
        raise ConfigError(f"{where} is {shown(extends)}; it must be a file name or a list of file names")
    if len(names) > MOST_EXTENDED:
        raise ConfigError(f"{where} names {len(names):,} files; the limit is {MOST_EXTENDED}")
    return [_parent(name, where, source, path) for name in names]


def _parent(name: str, where: str, source: str, path: Path | None) -> Path:
    """The file `name`, relative to the rules at `path`, or packaged."""
    found = recipes.find(name, path.parent if path else Path())
    if found is None:
        folder = f"in the folder of {source} " if path else ""
        near = nearest_spelling(Path(name).stem, recipes.names())
        raise ConfigError(
            f"{where}: there is no {shown(name)} {folder}or in the package{near}; packaged: "
            f"{', '.join(recipes.names())}"
        )
    # The suffix of a link's target counts, since the target is read.
    if found.resolve().suffix not in SUFFIXES:
        raise ConfigError(f"{where}: {shown(name)} is not a YAML file; its name must end in {' or '.join(SUFFIXES)}")
    return found


def _yes_or_no(content: Mapping[str, Any], key: str, default: bool, source: str) -> bool:
    value = content.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{located(source, content, key)}: {key} is {shown(value)}; it must be true or false")
    return value


def _rule(content: Any, source: str, reading: _Reading) -> Rule:
    content = _mapping(content, source, ("match", "replace", "recursive", "optional"), "a rule")
    for required in ("match", "replace"):
        if required not in content:
            raise ConfigError(f"{located(source, content)}: no {required!r}; a rule needs match and replace")
    match = _mapping(content["match"], f"{source}: match", ("name", "class"), "match")
    for key in match:
        if not isinstance(match[key], str) or not match[key]:
            raise ConfigError(
                f"{located(f'{source}: match', match, key)}: {key} is {shown(match[key])}; it must be text"
            )
    if not match:
        raise ConfigError(f"{located(f'{source}: match', content, 'match')}: give name, class, or both")
    recursive, optional = _yes_or_no(content, "recursive", True, source), _yes_or_no(content, "optional", False, source)
    replace_with = _mapping(content["replace"], f"{source}: replace", ("class", "kwargs"), "replace")
    where = located(f"{source}: replace", replace_with, "class")
    operator_name = replace_with.get("class")
    if not isinstance(operator_name, str) or not operator_name:
        raise ConfigError(f"{where}: class is {shown(operator_name)}; it must be an operator's name, or default")
    declaration = None if operator_name == "default" else named_operator(operator_name, where, reading.trusted)
    rule = Rule(
        source,
        _pattern(match, source, reading.search_time),
        match.get("class"),
        declaration,
        operator_name,
        recursive=recursive,
        optional=optional,
    )
    kwargs = replace_with.get("kwargs")
    classes = [owner.settings for owner in owners_of(declaration, _choice(declaration, kwargs))] if declaration else []
    return replace(rule, kwargs=_settings(kwargs, classes, f"{rule.title}: kwargs"))


def _choice(operator: OperatorDeclaration, kwargs: Any) -> str | None:
    """The policy that `kwargs` choose; None if they choose none."""
    chosen = kwargs.get(operator.chosen_by) if isinstance(kwargs, Mapping) and operator.chosen_by else None
    return chosen if isinstance(chosen, str) else None


def _pattern(match: Mapping[str, str], source: str, time: SearchTime) -> ModulePattern | None:
    if "name" not in match:
        return None
    try:
        return ModulePattern(match["name"], time)
    except ConfigError as error:
        raise ConfigError(f"{located(f'{source}: match', match, 'name')}: {error}") from error


def _mapping(value: Any, where: str, keys: tuple[str, ...], what: str) -> Mapping[str, Any]:
    """`value`; raises ConfigError unless it is a mapping with these keys only."""
    if not isinstance(value, Mapping):
        given = "empty" if value is None else shown(value)
        raise ConfigError(f"{where}: {what} is {given}; it must be a mapping with the keys {', '.join(keys)}")
    for key in value:
        if key not in keys:
            near = nearest_spelling(key, keys) or f"; known: {', '.join(keys)}"
            raise ConfigError(f"{located(where, value, key)}: unknown key {shown(key)}{near}")
    return value


def nearest_module_paths(pattern: str | re.Pattern[str], paths: Iterable[str], limit: int = 3) -> list[str]:
    """The module paths that are most similar to a pattern that matches none of them.

    Layer numbers count as equal; paths that differ only in them appear once.
    """
    text = pattern if isinstance(pattern, str) else pattern.pattern
    # `\d+` and similar stand for a number, `\.` for a dot; the rest of the syntax never occurs in a path.
    likely = re.sub(r"\\d[+*]?|\[0-9\][+*]?|\.[+*]\??|\d+", "0", text).replace("\\.", ".")
    likely = re.sub(r"\(\^\|\.\)|[\\^$()?*+\[\]]", "", likely)
    shapes: dict[str, str] = {}
    for path in paths:
        shapes.setdefault(re.sub(r"\d+", "0", path), path)
    return [shapes[shape] for shape in difflib.get_close_matches(likely, shapes, n=limit, cutoff=0.5)]
