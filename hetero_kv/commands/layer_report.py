"""Shows the operator and settings that rules give to each layer of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from hetero_kv.adapter import attention_module
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.adapter.replacement import Operator
from hetero_kv.commands.injected import InjectedModel
from hetero_kv.commands.settings_in_words import HIDDEN, short, written
from hetero_kv.printing import console, json_text
from hetero_kv.rules.injection import Injection
from hetero_kv.rules.precedence import DEFAULT
from hetero_kv.settings.description import describe, method_words

UNTOUCHED = "not replaced"
OVERRULED = "overruled in this layer"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class LayerRow:
    """Neighbouring layers in which a module gets the same operator and settings.

    Attributes:
        first, last: layer numbers; None for a module outside layers.
        module: its path, with `*` for the layer's number.
        operator: its operator; `UNTOUCHED` for an attention module that no rule replaces.
        method: the method of the operator in words: "QUEST, 2 per block, SEPARATE".
        rule: the matching rule, as its file calls it; None without one.
        settings: the settings in force in these layers, budgets as each layer has them; empty if the operator has none.
        changed: the names of settings that differ from the defaults.
        sources: the source of each setting: a rule, the `long_context:` of a file, the command line, the settings file,
            "default", or `OVERRULED` by another setting, as `dense_layer_num` overrules `top_k_blocks`.
    """

    first: int | None
    last: int | None
    module: str
    operator: str
    method: str
    rule: str | None
    settings: dict[str, Any]
    changed: frozenset[str]
    sources: dict[str, str] = field(default_factory=dict)

    def continues(self, other: LayerRow) -> bool:
        """Whether this row is the next layer's, and otherwise equal to `other`."""
        same = replace(self, first=other.first, last=other.last) == other
        return same and None not in (self.first, other.last) and self.first == (other.last or 0) + 1


def print_layers(subject: InjectedModel, *, as_json: bool, show_all: bool) -> None:
    """Print the table of a model's layers, or one JSON object."""
    rows = grouped(subject.injection, has_blocks=subject.stored is not None)
    if as_json:
        print(json_text(_report(subject, rows), default=str))
    else:
        _print(console(), subject, rows, show_all=show_all)


def grouped(injection: Injection, *, has_blocks: bool = True) -> list[LayerRow]:
    """The rows of replaced modules, and of attention modules that no rule replaces; equal neighbours are merged.

    The rows of a module are adjacent, in the model's order.

    Args:
        has_blocks: whether the weights to load are quantized blocks of a file; if not, operators that only keep such
            blocks are not injected when the model loads, and have no rows.
    """
    by_module: dict[str, list[LayerRow]] = {}
    for row in _rows(injection, has_blocks):
        rows = by_module.setdefault(row.module, [])
        if rows and row.continues(rows[-1]):
            rows[-1] = replace(rows[-1], last=row.last)
        else:
            rows.append(row)
    return [row for rows in by_module.values() for row in rows]


def _rows(injection: Injection, has_blocks: bool) -> list[LayerRow]:
    rows = []
    for path, module in injection.model.named_modules():
        if not has_blocks and isinstance(module, QuantizedModule) and module.waits_for_blocks():
            continue
        if isinstance(module, Operator):
            settings = module.settings_in_layer()
            defaults = {row.name: row.default for row in describe(type(module.settings))} if module.settings else {}
            # The setting that chooses the settings' class counts as changed: in each class it equals its default.
            changed = frozenset(
                name for name, value in settings.items() if value != defaults.get(name) or name == module.chosen_by
            )
            rule = injection.rules[module.path].source
            sources = _sources(module, settings, injection.sources[module.path])
            method = method_words(module.settings) if module.settings else ""
            number, place = _place(module.path)
            operator = type(module).__name__
            rows.append(LayerRow(number, number, place, operator, method, rule, settings, changed, sources))
        elif attention_module.is_attention(module) and not _inside_attention_operator(injection, path):
            number, place = _place(_own_path(path))
            rows.append(LayerRow(number, number, place, UNTOUCHED, "", None, {}, frozenset()))
    return rows


def _sources(operator: Operator, settings: dict[str, Any], known: dict[str, str]) -> dict[str, str]:
    """The source of each value in force in the operator's layer."""
    sources = {name: known.get(name, DEFAULT) for name in settings}
    for name, value in settings.items():
        own = getattr(operator.settings, name, value)
        # A layer's value of a list or a pyramid is one part of it; a number that became another one was overruled.
        if isinstance(own, int) and value != own:
            sources[name] = OVERRULED
    return sources


def _place(path: str) -> tuple[int | None, str]:
    """A module's layer number, None outside layers, and its path with `*` for that number."""
    number = _LAYER.search(path)
    return int(number[0]) if number else None, _LAYER.sub("*", path, count=1)


def _inside_attention_operator(injection: Injection, path: str) -> bool:
    own = _own_path(path)
    return any(own == other.path or own.startswith(f"{other.path}.") for other in injection.attention_operators())


def _own_path(path: str) -> str:
    """A module's path in the original model, without the operators around it."""
    return ".".join(part for part in path.split(".") if part != "wrapped")


def _report(subject: InjectedModel, rows: list[LayerRow]) -> dict[str, Any]:
    return {
        "model": subject.name,
        "config": subject.rules,
        "engine": asdict(subject.injection.engine),
        "engine_sources": subject.injection.sources[""],
        "modules": [{**asdict(row), "changed": sorted(row.changed)} for row in rows],
    }


def _print(terminal: Console, subject: InjectedModel, rows: list[LayerRow], *, show_all: bool) -> None:
    model_class = type(subject.injection.model).__name__
    terminal.print(f"[bold]{escape(subject.name)}[/bold] ({model_class}) with {escape(subject.rules)}", soft_wrap=True)
    engine = subject.injection.engine
    defaults = {row.name: row.default for row in describe(type(engine))}
    changed = frozenset(name for name, default in defaults.items() if getattr(engine, name) != default)
    settings = written(asdict(engine), changed, show_all, subject.injection.sources[""], subject.rules)
    terminal.print(f"[bold]engine[/bold]: {settings}", highlight=False, soft_wrap=True)
    width = max(len(row.operator) for row in rows)
    for modules, row in _alike(rows):
        if modules:
            terminal.print(f"[bold]{modules}[/bold]", highlight=False, soft_wrap=True)
        settings = written(row.settings, row.changed, show_all, row.sources, subject.rules)
        words = ": ".join(filter(None, (escape(row.method), settings)))
        line = f"  {_layers(row):7}  {row.operator:{width}}  {words}"
        rule = "no operator" if row.rule is None else short(row.rule, subject.rules)
        terminal.print(f"{line.rstrip()}  [dim]({escape(rule)})[/dim]", highlight=False, soft_wrap=True)
    if not show_all:
        terminal.print(HIDDEN, style="dim")


def _alike(rows: list[LayerRow]) -> Iterator[tuple[str, LayerRow]]:
    """The rows, each with the names of its modules; modules whose rows are equal are merged."""
    by_module: dict[str, list[LayerRow]] = {}
    for row in rows:
        by_module.setdefault(row.module, []).append(row)
    alike: list[tuple[list[str], list[LayerRow]]] = []
    for module, of_module in by_module.items():
        same = (known for known in alike if of_module[0].first is not None and _same(known[1], of_module))
        modules, _ = known = next(same, ([], of_module))
        if not modules:
            alike.append(known)
        modules.append(module)
    for modules, of_modules in alike:
        for place, row in enumerate(of_modules):
            yield ("" if place else _joined(modules)), row


def _same(rows: list[LayerRow], others: list[LayerRow]) -> bool:
    return [replace(row, module="") for row in rows] == [replace(row, module="") for row in others]


def _joined(modules: list[str]) -> str:
    """Paths in short: `model.layers.*.mlp.up_proj, down_proj`; numbers after the layer's are `*` too."""
    names = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module) for module in modules))
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names)
    children = {parent: [name for name in names if name.rpartition(".")[0] == parent] for parent in parents}
    return ", ".join(
        ", ".join([of_parent[0], *(name.rpartition(".")[2] for name in of_parent[1:])])
        for of_parent in children.values()
    )


def _layers(row: LayerRow) -> str:
    if row.first is None:
        return ""
    return str(row.first) if row.first == row.last else f"{row.first}-{row.last}"
