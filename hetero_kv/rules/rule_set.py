"""Rules as they were read: which module each matches, and the settings in force for what it puts there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from hetero_kv.adapter.operator import Operator
from hetero_kv.errors import ConfigError
from hetero_kv.rules.effect import require_effect, with_effect
from hetero_kv.rules.module_pattern import ModulePattern
from hetero_kv.rules.owners import Owner, owner_in_place, owners_of, registered_owners
from hetero_kv.rules.precedence import COMMAND_LINE, SETTINGS_FILE, Given, InForce, in_force, value_of
from hetero_kv.settings.engine_settings import EngineSettings


@dataclass(frozen=True, eq=False)
class RuleFile:
    """One file of rules, without them.

    Attributes:
        name: as messages show it.
        long_context: settings of the engine and of any operator under their own names, checked.
        extends: every file that it extends, theirs included, in the order in which they win.
    """

    name: str
    long_context: Mapping[str, Any] = field(default_factory=dict)
    extends: tuple[RuleFile, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One rule of a file.

    Attributes:
        source: where it stands, e.g. "injection_rules/quest.yaml: rule 3".
        match_name: searched in a module's path; None matches every path.
        match_class: class of the module, dotted or bare; None matches every class.
        operator: the operator class to put in; None leaves the module as it is.
        operator_name: the operator as the file spells it ("default" for none).
        kwargs: the operator's settings under their own names, checked.
        recursive: False keeps all later matching out of the module's children.
        optional: whether it may match nothing in a model.
        file: the file that it is a rule of.
    """

    source: str
    match_name: ModulePattern | None
    match_class: str | None
    operator: type[Operator] | None
    operator_name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    recursive: bool = True
    optional: bool = False
    file: RuleFile | None = field(default=None, compare=False, repr=False)

    @property
    def title(self) -> str:
        """The rule as errors and reports call it, e.g. "injection_rules/quest.yaml: rule 3 (RetrievalAttention)"."""
        return f"{self.source} ({self.operator_name.rpartition('.')[2]})"

    def matches(self, path: str, module: nn.Module) -> bool:
        """Whether `module`, at `path` in its model, is one this rule speaks of. A subclass counts as its class.

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
    # A class is often spelled by the package that re-exports it (torch.nn.Linear). Its instances exist, so that
    # package is imported already, and matching need not import anything.
    exported = _exported(package, name, is_loaded=any(cls.__name__ == name for cls in classes))
    return any(cls is exported or (cls.__name__ == name and package in ("", cls.__module__)) for cls in classes)


def _exported(package: str, name: str, *, is_loaded: bool) -> object:
    module = sys.modules.get(package)
    held = getattr(module, "__dict__", {})
    # Asked for what it does not hold, a package such as transformers imports modules: only for a class that is there.
    if name in held or not is_loaded:
        return held.get(name)
    try:
        return getattr(module, name, None)
    except Exception:
        return None


def _defaults(rule: Rule, operator: type[Operator]) -> InForce[Any]:
    """The settings of an operator that a kind of module needs instead of the rule's own."""
    cls = operator.settings_class
    return InForce(None, {}) if cls is None else in_force(cls, (), where=rule.title)


@dataclass(frozen=True)
class RuleSet:
    """Everything a rule file says, with what it extends.

    Attributes:
        path: the file; None for rules that came from text or Python objects.
        file: what the file says beside its rules.
        rules: in the order they are tried: a file's own before those of the files it extends.
    """

    path: Path | None
    file: RuleFile
    rules: tuple[Rule, ...]

    @property
    def long_context(self) -> dict[str, Any]:
        """The settings of all `long_context:` blocks under their own names; a child's win."""
        blocks = [file.long_context for file in (self.file, *self.file.extends)]
        return {name: value for block in reversed(blocks) for name, value in block.items()}

    def engine_in_force(
        self, *, command_line: Mapping[str, Any] | None = None, settings_file: Mapping[str, Any] | None = None
    ) -> InForce[EngineSettings]:
        """The engine's settings in force, with their sources. Raises ConfigError."""
        given = [Given(COMMAND_LINE, command_line or {}), *self._files(settings_file)]
        return in_force(EngineSettings, given, where=self.file.name)

    def engine_settings(
        self, *, command_line: Mapping[str, Any] | None = None, settings_file: Mapping[str, Any] | None = None
    ) -> EngineSettings:
        """The engine's settings in force. Raises ConfigError."""
        return self.engine_in_force(command_line=command_line, settings_file=settings_file).settings

    def parents_of(self, rule: Rule, path: str, module: nn.Module) -> list[Rule]:
        """The rules whose kwargs `rule` starts from in a module that both match, the nearest first.

        They are those that the files which its file extends would have for the module, as far as they put in the same
        operator class.
        """
        files = rule.file.extends if rule.file else ()
        firsts = (next((r for r in self.rules if r.file is file and r.matches(path, module)), None) for file in files)
        return [first for first in firsts if first is not None and first.operator is rule.operator]

    def operator_in_force(
        self,
        rule: Rule,
        parents: Sequence[Rule] = (),
        *,
        command_line: Mapping[str, Any] | None = None,
        settings_file: Mapping[str, Any] | None = None,
    ) -> InForce[Any]:
        """The settings in force for a rule's operator, with their sources; None for settings where it takes none.

        Args:
            parents: the rules whose kwargs it starts from (`parents_of`). Of these, and of all kwargs where the command
                line chooses another policy than they do, what the operator's settings lack is left out.

        Raises:
            ConfigError: a setting of the rule that its operator does not take, or settings that exclude each other.
        """
        operator = rule.operator
        if operator is None or operator.settings_class is None:
            return InForce(None, {})
        flags, files = Given(COMMAND_LINE, command_line or {}), self._files(settings_file)
        kwargs = [Given(each.source, each.kwargs) for each in (rule, *parents)]
        chosen_by = operator.chosen_by
        choice = value_of(chosen_by, [flags, *kwargs, *files]) if chosen_by else None
        cls = operator.settings_class_for({} if choice is None else {chosen_by: choice}) or operator.settings_class
        if chosen_by is not None:
            chosen = [value_of(chosen_by, [*kwargs[place:], *files]) for place in range(len(kwargs))]
            kwargs = [Given(one.source, one.settings, own == choice) for one, own in zip(kwargs, chosen, strict=True)]
        owner = Owner(operator.__name__, chosen_by, choice, cls, operator.settings_class)
        known = registered_owners([operator])
        for one in kwargs:
            if one.is_meant:
                require_effect(one.settings, [owner], known, where=f"{one.source}: kwargs", rules="the rule")
        return in_force(cls, [flags, *kwargs, *files], where=rule.title)

    def modules_in_force(
        self,
        plan: Iterable[tuple[Rule, type[Operator], str, nn.Module]],
        *,
        command_line: Mapping[str, Any] | None = None,
        settings_file: Mapping[str, Any] | None = None,
    ) -> dict[str, InForce[Any]]:
        """Path -> the settings in force for the operator of each module, which those of equal rules share.

        Args:
            plan: of every module the rule, the operator that it gives this module (its own, or what that kind of module
                needs instead), the path and the module.

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
        """The settings in force for a rule's operator, an instance of its `settings_class`; None where it has none.

        A rule's kwargs are part of the rules file and win over its `long_context`; see `operator_in_force`.

        Raises:
            ConfigError: the merged settings exclude each other.
        """
        found = self.operator_in_force(rule, parents, command_line=command_line, settings_file=settings_file)
        return found.settings

    def owners(self, command_line: Mapping[str, Any] | None = None) -> list[Owner]:
        """The owners of all that the rules may put into some model, without looking at one.

        Rules that match what an earlier one matches, by the same words, put nothing in.
        """
        found: dict[Owner, None] = {}
        for rule in self._reachable():
            chosen_by = rule.operator.chosen_by if rule.operator else None
            words = (command_line or {}).get(chosen_by, rule.kwargs.get(chosen_by)) if chosen_by else None
            choice = words if isinstance(words, str) else None
            found |= dict.fromkeys(owners_of(rule.operator, choice) if rule.operator else ())
        return list(found)

    def known_owners(self) -> list[Owner]:
        """The owners of the registered operators and of those that the rules name."""
        return registered_owners(rule.operator for rule in self.rules if rule.operator)

    def with_effect(
        self, settings: Mapping[Any, Any], *, where: str, beside: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Settings given with the rules, under their own names, checked.

        Args:
            where: the place named in errors.
            beside: others that win over the rules as well, which may choose another policy.

        Raises:
            ConfigError: an unknown setting, a wrong value, or a setting that no operator of the rules takes.
        """
        in_place = self.owners({**settings, **(beside or {})})
        return with_effect(settings, in_place, self.known_owners(), where=where, rules=self.file.name)

    def require_effect(
        self, command_line: Mapping[str, Any], injected: Iterable[tuple[Rule, type[Operator], Any]]
    ) -> None:
        """Raise ConfigError for a setting of the command line, or of the file itself, that nothing takes.

        Args:
            injected: of every module that gets an operator, the rule that gives it, the operator and its settings.
        """
        in_place: dict[Owner, None] = {}
        named: dict[Owner, None] = {}
        for rule, operator, settings in injected:
            owner = owner_in_place(operator, settings)
            in_place |= {owner: None} if owner else {}
            # The file speaks of what it names; it is not at fault where a layer's kind or a flag puts another in.
            if rule.operator is not None and (rule.operator is not operator or operator.chosen_by in command_line):
                named |= dict.fromkeys(owners_of(rule.operator))
        known = self.known_owners()
        require_effect(command_line, list(in_place), known, where=COMMAND_LINE, rules=self.file.name)
        self._require_effect_of_file([*in_place, *named])

    def require_own_effect(self) -> None:
        """Raise ConfigError for a setting of the file itself that no operator takes that the rules can put in."""
        self._require_effect_of_file(self.owners())

    def _require_effect_of_file(self, in_place: Sequence[Owner]) -> None:
        where = f"{self.file.name}: long_context"
        known = self.known_owners()
        require_effect(self.file.long_context, in_place, known, where=where, rules=self.file.name)

    def _files(self, settings_file: Mapping[str, Any] | None) -> list[Given]:
        own = Given(f"{self.file.name}: long_context", self.file.long_context)
        extended = [Given(f"{file.name}: long_context", file.long_context, False) for file in self.file.extends]
        return [own, *extended, Given(SETTINGS_FILE, settings_file or {}, False)]

    def _reachable(self) -> Iterator[Rule]:
        seen = set()
        for rule in self.rules:
            words = (rule.match_name.pattern if rule.match_name else None, rule.match_class)
            if words not in seen:
                yield rule
            seen.add(words)
