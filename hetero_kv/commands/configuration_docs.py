"""`docs/configuration.md`, written from the settings' dataclasses, the registries and the commands' flags.

python -m hetero_kv.commands.configuration_docs docs/configuration.md
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.cli import COMMANDS
from hetero_kv.engine.statistics import Statistic
from hetero_kv.rules.precedence import ALL_LONG_CONTEXT
from hetero_kv.rules.registered import operator_classes, registered
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.flags import FlagParser
from hetero_kv.settings.setting import SettingRow, Settings, describe

_OPENING = """\
<!-- Written by `make docs` from the settings' dataclasses; do not edit. -->

# Configuration

A setting has the same name everywhere: in the `long_context:` block of a rules file, in a rule's `kwargs:`, in
`~/.hetero_kv/config.yaml`, and as a flag. Which one wins, highest first:

1. the command line: `--name VALUE`, in either spelling (`--max_seq_len`, `--max-seq-len`)
2. the rules file (`--config`): a rule's `kwargs:` before any `long_context:`, a file's own before those of the files
   it `extends`
3. `~/.hetero_kv/config.yaml` (elsewhere with the environment variable `HETERO_KV_CONFIG`)
4. the defaults below

Aliases are names that other programs use, KTransformers first of all; they work wherever the name does. A mistake is an
error that names the file, the line, the key and the nearest right spelling.

`hetero-kv rules RULES --model MODEL` shows the settings in force in every layer, `hetero-kv plan --model MODEL --config
RULES` what they take in memory.
"""


def configuration_page() -> str:
    """The whole page, Markdown."""
    parts = [_OPENING, *_settings(), *_registries(), *_statistics(), *_flags()]
    return "\n".join(parts)


def _settings() -> Iterator[str]:
    yield "## Settings\n"
    takers = _takers()
    for cls in _settings_classes():
        rows = list(describe(cls))
        if not rows:
            continue
        taken_by = "the engine" if cls is EngineSettings else ", ".join(takers.get(cls, ()))
        where = "`long_context:` or a flag" if cls in ALL_LONG_CONTEXT else "the rule's `kwargs:`"
        if cls in takers and cls in ALL_LONG_CONTEXT:
            where = "`long_context:`, the rule's `kwargs:`, or a flag"
        yield f"### {_title(cls)}\n"
        yield f"Taken by {taken_by}. Set in {where}.\n"
        spellings = {f.name: f.metadata["constraints"].value_aliases for f in fields(cls) if f.metadata}  # type: ignore[arg-type]
        yield from _table(
            ("setting", "value", "default", "unit", "aliases", "meaning"),
            (_setting_cells(row, spellings[row.name]) for row in rows),
        )
    bare = [name for name, cls in operator_classes().items() if not _has_settings(cls.settings_class)]
    yield f"Without settings: {', '.join(f'`{name}`' for name in bare)}.\n"


def _settings_classes() -> list[type[Settings]]:
    """Those of the `long_context:` block, then those that only some operator takes; each once."""
    return list(dict.fromkeys((*ALL_LONG_CONTEXT, *_takers())))


def _takers() -> dict[type[Settings], list[str]]:
    """Settings class -> the operators that take it, each with what chooses it."""
    takers: dict[type[Settings], list[str]] = {}
    for name, operator in operator_classes().items():
        for choice, cls in operator.settings_classes().items():
            takers.setdefault(cls, []).append(f"`{name}` with `{choice}`" if choice else f"`{name}`")
    return takers


def _has_settings(cls: type | None) -> bool:
    return cls is not None and any(describe(cls))


def _title(cls: type[Settings]) -> str:
    """The first sentence of the class's docstring, without its full stop."""
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0].rstrip(".")


def _setting_cells(row: SettingRow, value_aliases: Mapping[str, str]) -> tuple[str, ...]:
    default = str(row.default).lower() if isinstance(row.default, bool) else str(row.default)
    values = [f"`{written}` for `{meant}`" for written, meant in value_aliases.items()]
    aliases = ", ".join([*(f"`{alias}`" for alias in row.aliases), *values])
    return (f"`{row.name}`", row.type, f"`{default}`" if default else "", row.unit or "", aliases, row.doc)


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
    names = {f"--{name}" for cls in ALL_LONG_CONTEXT for row in describe(cls) for name in (row.name, *row.aliases)}
    for name, command in COMMANDS.items():
        parser = FlagParser(f"hetero-kv {name}", command.summary)
        importlib.import_module(command.module).add_flags(parser)
        yield f"### {name}\n"
        yield f"{command.summary}\n"
        own = [action for action in parser._actions if not (names | {"--help"}) & set(action.option_strings)]
        yield from _table(("flag", "meaning"), ((_flag(action), action.help or "") for action in own))


def _flag(action: argparse.Action) -> str:
    words = ", ".join(action.option_strings)
    value = f" {action.metavar}" if action.metavar and action.nargs != 0 else ""
    return f"`{words}{value}`".replace("` ", "`")


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """A Markdown table, and the empty line after it."""
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
