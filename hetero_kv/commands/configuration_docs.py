"""Writes `docs/configuration.md` from the settings' dataclasses, the registries and the commands' flags.

python -m hetero_kv.commands.configuration_docs docs/configuration.md
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.cli import COMMANDS
from hetero_kv.contexts.settings import ContextCacheSettings
from hetero_kv.engine.statistics import Statistic
from hetero_kv.rules.owners import Owner, flat_classes, labels, registered_owners
from hetero_kv.rules.registered import operator_classes, registered
from hetero_kv.rules.setting_flags import SETTINGS_DEST
from hetero_kv.settings.description import SettingRow, describe
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.flags import FlagParser
from hetero_kv.settings.setting import Settings, entries_of

_OPENING = """\
<!-- Written by `make docs` from the settings' dataclasses; do not edit. -->

# Configuration

A setting has the same name everywhere: in the `long_context:` block of a rules file, in a rule's `kwargs:`, in
`~/.hetero_kv/config.yaml`, as a flag, and after the rules' name. The sources by precedence, highest first:

1. settings in the rules' name: `--config quest:block_size=32:kv_type=FP32`
2. the command line: `--name VALUE`, in either spelling (`--max_seq_len`, `--max-seq-len`); a list is `1,2,3` or
   `[1, 2, 3]`
3. the rules file (`--config`): a rule's `kwargs:`, then the `kwargs:` that it inherits, then `long_context:` of the
   file, then `long_context:` of the files that it `extends`
4. `~/.hetero_kv/config.yaml`, or the file that the environment variable `HETERO_KV_CONFIG` names
5. the defaults below

A rule inherits kwargs from the files that its file extends: from the first rule there that matches the module, if it
has the same operator class. So a rule that sets `top_k_blocks` for four layers changes nothing else in them. A
rule of `BoundedAttention` with another policy inherits the kwargs that this policy has.

A flag or key applies to every operator that has the setting. A setting that nothing in the model has is an error,
which names the operators that have it. This excludes settings of extended files and of `~/.hetero_kv/config.yaml`,
which serve many rules. The flag `--policy` overrides the rules' policy; their kwargs that the new policy lacks are
ignored. If a command has a flag of the same name (`chat --seed`, `eval --stride`), write the setting after the rules'
name: `--config random:seed=1`. Settings of your own operators are flags too, if the rules name these operators.

[Aliases](#aliases) work wherever the name does. An error names the file, the line, the key and the nearest valid
spelling.

`hetero-kv rules RULES --model MODEL` shows the settings in force in every layer, `hetero-kv plan --model MODEL --config
RULES` their memory.
"""


def configuration_page() -> str:
    """The whole page as Markdown."""
    parts = [_OPENING, *_settings(), *_aliases(), *_registries(), *_statistics(), *_flags()]
    return "\n".join(parts)


def _settings() -> Iterator[str]:
    yield "## Settings\n"
    operators = operator_classes()
    takers = _takers()
    for cls, taken_by in takers.items():
        rows = list(describe(cls))
        if not rows:
            continue
        where = (
            "`long_context:` or a flag" if cls is EngineSettings else "`long_context:`, the rule's `kwargs:`, or a flag"
        )
        yield f"### {_title(cls)}\n"
        yield f"Applies to {', '.join(taken_by)}. Set in {where}.\n"
        yield from _table(("setting", "value", "default", "unit", "meaning"), map(_setting_cells, rows))
    yield f"### {_title(ContextCacheSettings)}\n"
    yield "Applies to `chat` and `contexts`. Set in `contexts:` of `~/.hetero_kv/config.yaml`, or a flag.\n"
    yield from _table(
        ("setting", "value", "default", "unit", "meaning"), map(_setting_cells, describe(ContextCacheSettings))
    )
    bare = [name for name, operator in operators.items() if not _has_settings(operator.settings_class)]
    yield f"Without settings: {', '.join(f'`{name}`' for name in bare)}.\n"


def _takers() -> dict[type[Settings], list[str]]:
    """Settings class -> its users: the engine, the operators, and operators with one of their choices."""
    takers: dict[type[Settings], list[str]] = {EngineSettings: ["the engine"]}
    for owner in registered_owners():
        takers.setdefault(owner.base, [])
        words = f"`{owner.operator}`" + (f" with `{owner.chosen_by}: {owner.choice}`" if owner.choice else "")
        takers.setdefault(owner.settings, []).append(words)
        if owner.choice and not takers[owner.base]:
            takers[owner.base].append(f"`{owner.operator}`")
    return takers


def _has_settings(cls: type | None) -> bool:
    return cls is not None and any(describe(cls))


def _title(cls: type[Settings]) -> str:
    """The first sentence of the class's docstring, without its full stop."""
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0].rstrip(".")


def _setting_cells(row: SettingRow) -> tuple[str, ...]:
    default = str(row.default).lower() if isinstance(row.default, bool) else str(row.default)
    return (f"`{row.name}`", row.type, f"`{default}`" if default else "", row.unit or "", row.doc)


def _aliases() -> Iterator[str]:
    yield "## Aliases\n"
    yield "Names that other programs use, KTransformers first of all:\n"
    owners = registered_owners()
    classes: Sequence[Any] = flat_classes(owners)
    entries = [entry for cls in classes for entry in entries_of(cls).values()]
    aliases = {alias: f"`{entry.name}`" for entry in entries for alias in entry.constraints.aliases}
    for entry in entries:
        values = entry.constraints.value_aliases.items()
        aliases |= {written: f"`{meant}` of `{entry.name}`" for written, meant in values}
    yield from _table(("alias", "means"), ((f"`{alias}`", means) for alias, means in aliases.items()))
    yield (
        "Former names. A warning tells today's name, once per process. A former name counts for the operators that had "
        "it, and saved contexts of before still load:\n"
    )
    former: dict[tuple[str, str], list[Owner]] = {}
    for owner in owners:
        for row in describe(owner.settings):
            for name in row.formerly:
                former.setdefault((name, row.name), []).append(owner)
    yield from _table(
        ("former name", "today", "of"),
        ((f"`{was}`", f"`{name}`", labels(having, owners)) for (was, name), having in former.items()),
    )


def _registries() -> Iterator[str]:
    yield "## What rules can name\n"
    for kind, entries in registered().items():
        yield f"### {kind}\n"
        yield from _table(("name", "meaning"), ((f"`{entry.name}`", entry.meaning) for entry in entries))


def _statistics() -> Iterator[str]:
    yield "## What layers count\n"
    yield (
        "`/stats` shows it, `--json` has a value per layer under these names, evaluations have means over layers; in "
        "Python it is `HeteroCache.statistics`.\n"
    )
    counting: dict[Statistic, list[str]] = {}
    for name, cls in operator_classes().items():
        for statistic in cls.statistics if issubclass(cls, AttentionOperator) else ():
            counting.setdefault(statistic, []).append(f"`{name}`")
    yield from _table(
        ("name", "operators", "meaning"),
        ((f"`{counted.name}`", ", ".join(names), counted.meaning) for counted, names in counting.items()),
    )


def _flags() -> Iterator[str]:
    yield "## Commands\n"
    yield "Every setting above is a flag too, of the commands that run or plan with rules; these are the other flags.\n"
    for name, command in COMMANDS.items():
        parser = FlagParser(f"hetero-kv {name}", command.summary)
        importlib.import_module(command.module).add_flags(parser)
        yield f"### {name}\n"
        yield f"{command.summary}\n"
        own = [action for action in parser._actions if action.dest not in (SETTINGS_DEST, "help")]
        yield from _table(("flag", "meaning"), ((_flag(action), _meaning(parser, action)) for action in own))


def _meaning(parser: FlagParser, action: argparse.Action) -> str:
    """The help of a flag, with its default filled in."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _flag(action: argparse.Action) -> str:
    words = ", ".join(action.option_strings) or action.dest
    named = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
    value = f" {named}" if named and action.nargs != 0 else ""
    return f"`{words}{value}`".replace("` ", "`")


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """A Markdown table, followed by an empty line."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for cells in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('%%', '%') for cell in cells)} |"
    yield ""


def main() -> None:
    """Write the page to the file named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m hetero_kv.commands.configuration_docs FILE")
    Path(sys.argv[1]).write_text(configuration_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
