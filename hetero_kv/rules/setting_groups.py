"""Groups settings by the operators that have them, for `--help`, the settings file and the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hetero_kv.rules.owners import Owner, labels
from hetero_kv.settings.description import SettingRow, describe, description_of, setting_names
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.setting import Settings


class Sense(NamedTuple):
    """One meaning of a setting, with the owners that share it; `defaults` maps each default to its owners."""

    row: SettingRow
    owners: list[Owner]
    defaults: dict[str, list[Owner]]


class GroupedSetting(NamedTuple):
    """A setting's name with all its meanings.

    Attributes:
        row: the description by the setting's first owner, with the former names that it has under any of them.
        senses: its meanings; several if the name differs in meaning between operators or policies.
        elsewhere: the operators that have it, if they differ from the group's; else "".
    """

    row: SettingRow
    senses: list[Sense]
    elsewhere: str

    def meaning(self, known: Sequence[Owner]) -> str:
        """Meaning, type, unit and default of every sense, and the operators that have it."""
        several = len(self.senses) > 1
        words = [_words(sense, f" [{labels(sense.owners, known)}]" if several else "") for sense in self.senses]
        return "; or ".join(words) + (f"; counts for {self.elsewhere}" if self.elsewhere and not several else "")


class SettingGroup(NamedTuple):
    """Settings under a title that names their operators."""

    title: str
    settings: list[GroupedSetting]


def setting_groups(owners: Sequence[Owner]) -> list[SettingGroup]:
    """The settings of the engine and of `owners`, each name in one group; empty groups are dropped."""
    groups = [SettingGroup("engine", [_engine_setting(row) for row in describe(EngineSettings)])]
    seen = set(setting_names(EngineSettings))
    for title, theirs, classes in _titled(owners):
        every = dict.fromkeys(name for cls in classes for name in setting_names(cls))
        names = [name for name in every if name not in seen and _belongs(name, theirs, title)]
        seen.update(names)
        groups.append(SettingGroup(title, [_grouped(name, theirs, owners) for name in names]))
    return [group for group in groups if group.settings]


def _titled(owners: Sequence[Owner]) -> Iterable[tuple[str, list[Owner], list[type[Settings]]]]:
    """The possible groups: title, owners, and the dataclasses with their settings."""
    for operator in dict.fromkeys(owner.operator for owner in owners):
        own = [owner for owner in owners if owner.operator == operator]
        chosen_by = own[0].chosen_by
        if chosen_by is None:
            yield operator, own, [own[0].settings]
            continue
        yield f"{operator} (every {chosen_by})", own, [own[0].base]
        classes = [owner.settings for owner in own]
        yield f"{operator} (more than one {chosen_by})", own, classes
        for owner in own:
            yield f"{operator} ({chosen_by} {owner.choice})", [owner], [owner.settings]


def _belongs(name: str, theirs: Sequence[Owner], title: str) -> bool:
    """Whether a setting belongs in the group: in a "more than one" group only if at least two owners have it."""
    takers = [owner for owner in theirs if name in setting_names(owner.settings)]
    return "(more than one " not in title or len(takers) > 1


def _engine_setting(row: SettingRow) -> GroupedSetting:
    return GroupedSetting(row, [Sense(row, [], {str(row.default): []})], "")


def _grouped(name: str, theirs: Sequence[Owner], owners: Sequence[Owner]) -> GroupedSetting:
    takers = [owner for owner in owners if name in setting_names(owner.settings)]
    senses: dict[tuple[str, str, str | None], Sense] = {}
    formerly: dict[str, None] = {}
    for owner in takers:
        # The choosing setting has another default in each choice's dataclass; the base has the default choice.
        cls = owner.base if name == owner.chosen_by else owner.settings
        own = description_of(cls, name)
        sense = senses.setdefault((own.doc, own.type, own.unit), Sense(own, [], {}))
        formerly |= dict.fromkeys(own.formerly)
        sense.owners.append(owner)
        sense.defaults.setdefault(str(own.default), []).append(owner)
    elsewhere = labels(takers, owners) if {*takers} != {*theirs} else ""
    # A dataclass that redefines an inherited setting does not describe it for the others.
    first = next(sense for sense in senses.values() if not _says_anew(sense, senses.values()))
    return GroupedSetting(first.row._replace(formerly=tuple(formerly)), list(senses.values()), elsewhere)


def _says_anew(sense: Sense, senses: Iterable[Sense]) -> bool:
    """Whether this sense redefines a setting that its owner's dataclass inherits."""
    bases = sense.owners[0].settings.__mro__[1:]
    return any(owner.settings in bases for other in senses if other is not sense for owner in other.owners)


def _words(sense: Sense, suffix: str) -> str:
    row = sense.row
    unit = f", in {row.unit}" if row.unit else ""
    return f"{row.doc} ({row.type}{unit}; default {default_words(sense)}){suffix}"


def default_words(sense: Sense) -> str:
    """The default, or every default with its owners."""
    if len(sense.defaults) == 1:
        return str(sense.row.default)
    return ", ".join(
        f"{value} ({', '.join(owner.choice or owner.operator for owner in owners)})"
        for value, owners in sense.defaults.items()
    )
