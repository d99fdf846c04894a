"""A parsed rule set: which modules each rule matches, and the settings in force for its operator."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_kv.errors import ConfigError
from hetero_kv.rules.effect import require_effect, with_effect
from hetero_kv.rules.module_pattern import ModulePattern
from hetero_kv.rules.operator_names import declaration_of
from hetero_kv.rules.owners import Owner, owner_in_place, owners_of, registered_owners
from hetero_kv.rules.precedence import COMMAND_LINE, SETTINGS_FILE, InForce, SettingsSource, before, in_force, value_of
from hetero_kv.settings.declaration import OperatorDeclaration
from hetero_kv.settings.engine_settings import EngineSettings

if TYPE_CHECKING:
    from torch import nn

    from hetero_kv.adapter.replacement import Operator


@dataclass(frozen=True, eq=False)
class RuleFile:
    """A rules file's name, settings and parents, without its rules.

    Attributes:
        name: as messages show it.
        long_context: checked settings of the engine and of any operator, by canonical key.
        extends: every file that it extends, directly or indirectly, highest precedence first.
    """

    name: str
    long_context: Mapping[str, Any] = field(default_factory=dict)
    extends: tuple[RuleFile, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One rule of a file.

    Attributes:
        source: its file and number, e.g. "injection_rules/quest.yaml: rule 3".
        match_name: searched in a module's path; None matches every path.
        match_class: class of the module, dotted or bare; None matches every class.
        declaration: the operator to inject; None keeps the module.
        operator_name: the operator as the file spells it ("default" for none).
        kwargs: the operator's checked settings, by canonical key.
        recursive: False excludes the module's children from matching.
        optional: whether it may match nothing in a model.
        file: the rule's file.
    """

    source: str
    match_name: ModulePattern | None
    match_class: str | None
    declaration: OperatorDeclaration | None
    operator_name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    recursive: bool = True
    optional: bool = False
    file: RuleFile | None = field(default=None, compare=False, repr=False)

    @property
    def operator(self) -> type[Operator] | None:
        """The operator's class, imported now; None keeps the module."""
        return None if self.declaration is None else self.declaration.load()

    @property
    def title(self) -> str:
        """The rule as errors and reports call it, e.g. "injection_rules/quest.yaml: rule 3 (RetrievalAttention)"."""
        return f"{self.source} ({self.operator_name.rpartition('.')[2]})"

    def matches(self, path: str, module: nn.Module) -> bool:
        """Whether the rule matches `module` at `path`. An instance of a subclass matches too.

        Raises ConfigError when the search for `match_name` takes too long.
        """
        try:
            if self.match_name is not None and not self.match_name.is_in(path):
                return False
        except ConfigError as error:
            raise ConfigError(f"{self.title}: match: {error}") from error
        return self.match_class is None or _is_instance(module, self.match_class)


def _is_instance(module: nn.Module, class_name: str) -> bool:
    package, _, name = class_name.rpartition(".")
    classes = type(module).__mro__
    # Rules often name a class by the package that re-exports it (torch.nn.Linear). An instance exists, so that package
    # is imported, and matching imports nothing.
    exported = _exported(package, name, is_loaded=any(cls.__name__ == name for cls in classes))
    return any(cls is exported or (cls.__name__ == name and package in ("", cls.__module__)) for cls in classes)


def _exported(package: str, name: str, *, is_loaded: bool) -> object:
    module = sys.modules.get(package)
    attributes = getattr(module, "__dict__", {})
    # A lazy package such as transformers imports modules on getattr, so getattr is called for loaded classes only.
    if name in attributes or not is_loaded:
        return attributes.get(name)
    try:
        return getattr(module, name, None)
    except Exception:
        return None


def _defaults(rule: Rule, operator: type[Operator]) -> InForce[Any]:
    """The default settings of an operator that replaces the rule's own for a kind of module."""
    cls = operator.settings_class
    return InForce(None, {}) if cls is None else in_force(cls, (), where=rule.title)


@dataclass(frozen=True)
class RuleSet:
    """The content of a rules file and of the files that it extends.

    Attributes:
        path: the file; None for rules from text or Python objects.
        file: the file's name, settings and parents.
        rules: in matching order: a file's own before those of the files it extends.
    """

    path: Path | None
    file: RuleFile
    rules: tuple[Rule, ...]

    @property
    def long_context(self) -> dict[str, Any]:
        """The merged settings of all `long_context:` blocks by canonical key, those of the extending file first.

        A setting may be there under a former name too; the first wins, as in `in_force`.
        """
        return reduce(before, (file.long_context for file in (self.file, *self.file.extends)), {})

    def engine_in_force(
        self, *, command_line: Mapping[str, Any] | None = None, settings_file: Mapping[str, Any] | None = None
    ) -> InForce[EngineSettings]:
        """The engine's settings in force, with their sources. Raises ConfigError."""
        by_precedence = [SettingsSource(COMMAND_LINE, command_line or {}), *self._files(settings_file)]
        return in_force(EngineSettings, by_precedence, where=self.file.name)

    def engine_settings(
        self, *, command_line: Mapping[str, Any] | None = None, settings_file: Mapping[str, Any] | None = None
    ) -> EngineSettings:
        """The engine's settings in force. Raises ConfigError."""
        return self.engine_in_force(command_line=command_line, settings_file=settings_file).settings

    def parents_of(self, rule: Rule, path: str, module: nn.Module) -> list[Rule]:
        """The rules whose kwargs `rule` inherits for a module, the nearest first.

        For each file that the rule's file extends, this is the first rule that matches the module, if it has the same
        operator class.
        """
        files = rule.file.extends if rule.file else ()
        firsts = (next((r for r in self.rules if r.file is file and r.matches(path, module)), None) for file in files)
        return [first for first in firsts if first is not None and first.declaration == rule.declaration]

    def operator_in_force(
        self,
        rule: Rule,
        parents: Sequence[Rule] = (),
        *,
        command_line: Mapping[str, Any] | None = None,
        settings_file: Mapping[str, Any] | None = None,
    ) -> InForce[Any]:
        """The settings in force for a rule's operator, with their sources; the settings are None if it has none.

        Args:
            parents: the rules whose kwargs it inherits (`parents_of`). Kwargs that choose another policy than the one
                in force may contain settings that the operator lacks; these are skipped.

        Raises:
            ConfigError: a setting of the rule that its operator does not have, or settings that exclude each other.
        """
        operator = rule.declaration
        if operator is None or operator.settings_class is None:
            return InForce(None, {})
        flags, files = SettingsSource(COMMAND_LINE, command_line or {}), self._files(settings_file)
        kwargs = [SettingsSource(each.source, each.kwargs) for each in (rule, *parents)]
        chosen_by = operator.chosen_by
        choice = value_of(chosen_by, [flags, *kwargs, *files]) if chosen_by else None
        cls = operator.settings_class_for({} if choice is None else {chosen_by: choice}) or operator.settings_class
        if chosen_by is not None:
            chosen = [value_of(chosen_by, [*kwargs[place:], *files]) for place in range(len(kwargs))]
            kwargs = [
                SettingsSource(one.source, one.settings, own == choice) for one, own in zip(kwargs, chosen, strict=True)
            ]
        owner = Owner(operator.name, chosen_by, choice, cls, operator.settings_class)
        known = registered_owners([operator])
        for one in kwargs:
            if one.is_strict:
                require_effect(one.settings, [owner], known, where=f"{one.source}: kwargs", rules="the rule")
        return in_force(cls, [flags, *kwargs, *files], where=rule.title)

    def modules_in_force(
        self,
        plan: Iterable[tuple[Rule, type[Operator], str, nn.Module]],
        *,
        command_line: Mapping[str, Any] | None = None,
        settings_file: Mapping[str, Any] | None = None,
    ) -> dict[str, InForce[Any]]:
        """Path -> the settings in force for each module's operator; modules with equal rules share one object.

        Args:
            plan: per module: the rule, the operator class (the rule's, or the one that this kind of module needs
                instead), the path and the module.

        Raises ConfigError as `operator_in_force`.
        """
        found: dict[tuple[Any, ...], InForce[Any]] = {}
        in_place = {}
        for rule, operator, path, module in plan:
            parents = self.parents_of(rule, path, module) if operator is rule.operator else []
            key = (id(rule), operator, *map(id, parents))
            if key not in found:
                found[key] = (
                    self.operator_in_force(rule, parents, command_line=command_line, settings_file=settings_file)
                    if operator is rule.operator
                    else _defaults(rule, operator)
                )
            in_place[path] = found[key]
        return in_place

    def operator_settings(
        self,
        rule: Rule,
        parents: Sequence[Rule] = (),
        *,
        command_line: Mapping[str, Any] | None = None,
        settings_file: Mapping[str, Any] | None = None,
    ) -> Any:
        """The settings in force for a rule's operator, an instance of its `settings_class`; None if it has none.

        A rule's kwargs are part of the rules file and win over its `long_context`; see `operator_in_force`.

        Raises:
            ConfigError: the merged settings exclude each other.
        """
        found = self.operator_in_force(rule, parents, command_line=command_line, settings_file=settings_file)
        return found.settings

    def owners(self, command_line: Mapping[str, Any] | None = None) -> list[Owner]:
        """The owners of every operator that the rules can inject, whatever the model.

        A rule with the same match as an earlier one never injects anything.
        """
        found: dict[Owner, None] = {}
        for rule in self._reachable():
            chosen_by = rule.declaration.chosen_by if rule.declaration else None
            words = (command_line or {}).get(chosen_by, rule.kwargs.get(chosen_by)) if chosen_by else None
            choice = words if isinstance(words, str) else None
            found |= dict.fromkeys(owners_of(rule.declaration, choice) if rule.declaration else ())
        return list(found)

    def known_owners(self) -> list[Owner]:
        """The owners of the registered operators and of the operators that the rules name."""
        return registered_owners(rule.declaration for rule in self.rules if rule.declaration)

    def with_effect(
        self, settings: Mapping[Any, Any], *, where: str, override: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """`settings` by canonical key, checked against the rules' operators.

        Args:
            where: the place that errors name.
            override: other settings that win over the rules; they may choose another policy.

        Raises:
            ConfigError: an unknown setting, a wrong value, or a setting that no operator of the rules has.
        """
        in_place = self.owners({**settings, **(override or {})})
        return with_effect(settings, in_place, self.known_owners(), where=where, rules=self.file.name)

    def require_effect(
        self,
        command_line: Mapping[str, Any],
        injected: Iterable[tuple[Rule, type[Operator], Any]],
        skipped: Iterable[Rule] = (),
    ) -> None:
        """Raise ConfigError for a setting of the command line, or of the file itself, that no operator has.

        Args:
            injected: per replaced module: the rule, the operator class and its settings.
            skipped: rules of attention that match modules without keys and values; a file may set what they have.
        """
        in_place: dict[Owner, None] = {}
        named = dict.fromkeys(owner for each in skipped if each.declaration for owner in owners_of(each.declaration))
        for rule, operator, settings in injected:
            owner = owner_in_place(declaration_of(operator), settings)
            in_place |= {owner: None} if owner else {}
            # A file may set what its named operator has, even if a layer's kind or a flag selects another operator.
            if rule.declaration is not None and (
                rule.declaration.load() is not operator or operator.chosen_by in command_line
            ):
                named |= dict.fromkeys(owners_of(rule.declaration))
        known = self.known_owners()
        require_effect(command_line, list(in_place), known, where=COMMAND_LINE, rules=self.file.name)
        self._require_effect_of_file([*in_place, *named])

    def require_own_effect(self) -> None:
        """Raise ConfigError for a setting of the file itself that no operator of the rules has."""
        self._require_effect_of_file(self.owners())

    def _require_effect_of_file(self, in_place: Sequence[Owner]) -> None:
        where = f"{self.file.name}: long_context"
        known = self.known_owners()
        require_effect(self.file.long_context, in_place, known, where=where, rules=self.file.name)

    def _files(self, settings_file: Mapping[str, Any] | None) -> list[SettingsSource]:
        own = SettingsSource(f"{self.file.name}: long_context", self.file.long_context)
        extended = [
            SettingsSource(f"{file.name}: long_context", file.long_context, False) for file in self.file.extends
        ]
        return [own, *extended, SettingsSource(SETTINGS_FILE, settings_file or {}, False)]

    def _reachable(self) -> Iterator[Rule]:
        seen = set()
        for rule in self.rules:
            words = (rule.match_name.pattern if rule.match_name else None, rule.match_class)
            if words not in seen:
                yield rule
            seen.add(words)
