"""The command `rules`: the rules of a file, or the operator and settings that they give to each layer of a model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from hetero_kv.commands.injected import add_model_flags
from hetero_kv.commands.settings_in_words import HIDDEN, short, written
from hetero_kv.printing import console, json_text
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.precedence import InForce
from hetero_kv.rules.recipes import display
from hetero_kv.rules.rule_set import Rule
from hetero_kv.rules.setting_flags import add_setting_flags, settings_of
from hetero_kv.rules.settings_file import read_settings_file
from hetero_kv.rules.trust import trusted_modules
from hetero_kv.settings.description import describe, method_words
from hetero_kv.settings.flags import FlagParser


def add_flags(parser: FlagParser) -> None:
    """Add the command's flags to `parser`."""
    parser.usage = f"{parser.prog} RULES [flags]"
    parser.epilog = (
        "Sources of settings, the first wins: RULES' own (quest:block_size=32), these flags, the rules file, "
        "~/.hetero_kv/config.yaml, the defaults shown."
    )
    parser.add_argument(
        "rules",
        metavar="RULES",
        help="rules file, or a recipe's name, optionally with settings: quest:block_size=32",
    )
    parser.add_argument("--all", action="store_true", help="show every setting, including those at their default")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every setting")
    add_model_flags(parser, default="none, which shows the rules alone")
    add_setting_flags(parser, lambda flags: [flags.rules])


def run(flags: argparse.Namespace) -> int:
    """Print the rules, or a model's layers under them; returns the exit status.

    Raises:
        HeteroKVError: a mistake in the flags or files, a model that cannot be found, or rules that do not fit it.
    """
    if flags.model is None and flags.gguf_path is None:
        _print_rules(flags)
        return 0
    # Imported here, because they import torch, which rules alone do not need.
    from hetero_kv.commands.injected import injected_model
    from hetero_kv.commands.layer_report import print_layers

    print_layers(injected_model(flags), as_json=flags.json, show_all=flags.all)
    return 0


def _print_rules(flags: argparse.Namespace) -> None:
    """Print every rule with its operator's settings in force; those inherited by a matching module need a model."""
    config = named_config(flags.rules, trusted_modules(flags))
    command_line, settings_file = config.command_line(settings_of(flags)), read_settings_file()
    engine = config.rules.engine_in_force(command_line=command_line, settings_file=settings_file)
    rules = [
        (rule, config.rules.operator_in_force(rule, command_line=command_line, settings_file=settings_file))
        for rule in config.rules.rules
    ]
    name = display(config.rules.path) if config.rules.path else "rules"
    if flags.json:
        print(json_text(_report(name, engine, rules), default=str))
        return
    terminal = console()
    terminal.print(f"[bold]{escape(name)}[/bold], without a model", soft_wrap=True)
    words = written(asdict(engine.settings), _changed(engine), flags.all, engine.sources, name)
    terminal.print(f"[bold]engine[/bold]: {words}", highlight=False, soft_wrap=True)
    for rule, in_force in rules:
        terminal.print(f"[bold]{escape(_matched(rule))}[/bold]", highlight=False, soft_wrap=True)
        words = written(_settings(in_force), _changed(in_force), flags.all, in_force.sources, name)
        method = escape(method_words(in_force.settings)) if in_force.settings else ""
        line = f"  {escape(_operator(rule))}  {': '.join(filter(None, (method, words)))}"
        terminal.print(
            f"{line.rstrip()}  [dim]({escape(short(rule.source, name))})[/dim]", highlight=False, soft_wrap=True
        )
    if not flags.all:
        terminal.print(HIDDEN, style="dim")
    terminal.print(
        "--model MODEL shows which layers each rule matches, and what they inherit from extended files.", style="dim"
    )


def _report(name: str, engine: InForce[Any], rules: list[tuple[Rule, InForce[Any]]]) -> dict[str, Any]:
    return {
        "config": name,
        "engine": asdict(engine.settings),
        "engine_sources": engine.sources,
        "rules": [
            {
                "rule": rule.source,
                "match": _matched(rule),
                "operator": _operator(rule),
                "method": method_words(in_force.settings) if in_force.settings else "",
                "settings": _settings(in_force),
                "changed": sorted(_changed(in_force)),
                "sources": in_force.sources,
            }
            for rule, in_force in rules
        ],
    }


def _matched(rule: Rule) -> str:
    """What the rule matches: its pattern, its class, or both."""
    pattern = rule.match_name.pattern if rule.match_name else None
    return " and ".join(filter(None, (pattern, rule.match_class)))


def _operator(rule: Rule) -> str:
    return rule.declaration.name if rule.declaration else rule.operator_name


def _settings(in_force: InForce[Any]) -> dict[str, Any]:
    """The settings in force, in the order of the fields."""
    if in_force.settings is None:
        return {}
    return {row.name: getattr(in_force.settings, row.name) for row in describe(type(in_force.settings))}


def _changed(in_force: InForce[Any]) -> set[str]:
    """The settings that differ from the defaults."""
    if in_force.settings is None:
        return set()
    defaults = {row.name: row.default for row in describe(type(in_force.settings))}
    return {name for name, value in _settings(in_force).items() if value != defaults[name]}
