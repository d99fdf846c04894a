"""Every setting once, grouped by the operators that take it: for `--help`, the settings file and the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hetero_kv.rules.owners import Owner, labels
from hetero_kv.settings.description import SettingRow, describe, setting_names
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.setting import Settings


class Sense(NamedTuple):
    """What a setting means to some of those that take it; `defaults` says whose default it is, where they differ."""

    row: SettingRow
    owners: list[Owner]
    defaults: dict[str, list[Owner]]


class GroupedSetting(NamedTuple):
    """A setting of one name.

    Attributes:
        row: as the first that takes it has it.
        senses: what it means; several where a name means different things to different operators or policies.
        elsewhere: for whom it counts, where the group's title does not say it; "" else.
    """

    row: SettingRow
    senses: list[Sense]
    elsewhere: str

    def meaning(self, known: Sequence[Owner]) -> str:
        """Meaning, type, unit and default of every sense, and for whom it counts."""
        several = len(self.senses) > 1
        words = [_words(sense, f" [{labels(sense.owners, known)}]" if several else "") for sense in self.senses]
        return "; or ".join(words) + (f"; counts for {self.elsewhere}" if self.elsewhere and not several else "")


class SettingGroup(NamedTuple):
    """Settings under the title of those that take them."""

    title: str
    settings: list[GroupedSetting]


def setting_groups(owners: Sequence[Owner]) -> list[SettingGroup]:
    """The settings of the engine and of `owners`, each name in one group; groups without any are left out."""
    groups = [SettingGroup("engine", [_engine_setting(row) for row in describe(EngineSettings)])]
    seen = set(setting_names(EngineSettings))
    for title, theirs, classes in _titled(owners):
        rows = dict.fromkeys(row.name for cls in classes for row in describe(cls))
        names = [name for name in rows if name not in seen and _belongs(name, theirs, title)]
        seen.update(names)
        groups.append(SettingGroup(title, [_grouped(name, theirs, owners) for name in names]))
    return [group for group in groups if group.settings]


def _titled(owners: Sequence[Owner]) -> Iterable[tuple[str, list[Owner], list[type[Settings]]]]:
    """The groups there may be: their title, whose they are, and the dataclasses that have their settings."""
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
    """Whether a group of several choices is the place of a setting: one that a single choice has stands with it."""
    takers = [owner for owner in theirs if name in setting_names(owner.settings)]
    return "(more than one " not in title or len(takers) > 1


def _engine_setting(row: SettingRow) -> GroupedSetting:
    return GroupedSetting(row, [Sense(row, [], {str(row.default): []})], "")


def _grouped(name: str, theirs: Sequence[Owner], owners: Sequence[Owner]) -> GroupedSetting:
    takers = [owner for owner in owners if name in setting_names(owner.settings)]
    senses: dict[tuple[str, str, str | None], Sense] = {}
    for owner in takers:
        # What chooses among the dataclasses has another default in each, and one before there is a choice.
        cls = owner.base if name == owner.chosen_by else owner.settings
        own = next(each for each in describe(cls) if each.name == name)
        sense = senses.setdefault((own.doc, own.type, own.unit), Sense(own, [], {}))
        sense.owners.append(owner)
        sense.defaults.setdefault(str(own.default), []).append(owner)
    elsewhere = labels(takers, owners) if {*takers} != {*theirs} else ""
    # What a dataclass says anew of a setting that it inherits counts for itself alone.
    first = next(sense for sense in senses.values() if not _says_anew(sense, senses.values()))
    return GroupedSetting(first.row, list(senses.values()), elsewhere)


def _says_anew(sense: Sense, senses: Iterable[Sense]) -> bool:
    """Whether a setting with this sense is inherited from where it has another one."""
    bases = sense.owners[0].settings.__mro__[1:]
    return any(owner.settings in bases for other in senses if other is not sense for owner in other.owners)


def _words(sense: Sense, suffix: str) -> str:
    row = sense.row
    unit = f", in {row.unit}" if row.unit else ""
    return f"{row.doc} ({row.type}{unit}; default {default_words(sense)}){suffix}"


def default_words(sense: Sense) -> str:
    """The default, or each with whose it is."""
    if len(sense.defaults) == 1:
        return str(sense.row.default)
    return ", ".join(
        f"{value} ({', '.join(owner.choice or owner.operator for owner in owners)})"
        for value, owners in sense.defaults.items()
    )
