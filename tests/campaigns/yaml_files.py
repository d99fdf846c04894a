"""Rules and settings files, mutated: they are read quickly, and refused by name or read correctly."""

from __future__ import annotations

import random as randomness
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.campaigns.campaign import Campaign, WrongResultError
from tests.campaigns.mutation import mutated

TAGS = (
    "timestamp x",
    "bool x",
    'int ""',
    "map [a]",
    "map a",
    "seq {}",
    "set [a]",
    "omap {a: b}",
    "binary é",
    "float x",
    "pairs [a]",
    "null x",
    "python/name:os.system",
    "merge x",
    "value x",
    "str [a]",
)
VALUES = (
    *(f"!!{tag}" for tag in TAGS),
    "1" * 23,
    "9" * 5000,
    "0x" + "f" * 90,
    "1:2:3",
    "1e999",
    "-.inf",
    ".nan",
    "~",
    "",
    "[]",
    "{}",
    "2026-99-99",
    "*a",
    "&a [*a]",
    "<<: *a",
    "yes",
    "'x'",
    "[1, 2]",
    "pyramid(1, 99999999999999)",
    "all",
    "auto",
    "-1",
    "0",
    "../../etc/passwd",
    "~nobody/x",
    "[" * 60,
    "{a: " * 60,
    "x" * 3000,
    "\x00",
    "\u202e",
    "\ud7ff",
    "1_0",
    "0b1",
    "!!int 0b_",
)
PATTERNS = (
    "(a+)+$",
    "^(a|a)*$",
    "(a|aa)+$",
    "(" * 20,
    "a{9999999}",
    "[",
    r"\p{L}",
    "(?:" * 9 + ")" * 9,
    ".*" * 100,
    r"(?P<x>.)(?P=x)",
    r"^(\w+\.?)*!$",
    "(?i)x",
    "(?x) a # b",
    "a{e<=1}",
    "(?R)",
    r"\1",
    "{,5}",
    "[[a]",
    "self_attn$",
)
CLASSES = (
    "default",
    "RetrievalAttention",
    "hetero_kv.operators.BoundedAttention",
    "os.system",
    "antigravity.x",
    "this.x",
    ".x",
    "x.",
    "..",
    "hetero_kv.x.y",
    "builtins.exit",
    "__main__.x",
    "torch.nn.Linear",
    "Operator",
    "x" * 500,
    "é.x",
    "a b.c",
)
PATHS = ["model.layers.0.self_attn", "model.layers.11.mlp.up_proj", "lm_head", "a" * 60]


def prepare(folder: Path) -> list[str]:
    """The packaged rules and the settings file with all its settings in force, to be mutated."""
    from hetero_kv.rules import recipes
    from hetero_kv.rules.settings_file import settings_text

    folders = [Path(path) for path in map(_found, recipes.names())]
    return [*(path.read_text() for path in folders), settings_text().replace("\n  #", "\n  ")]


def _found(name: str) -> Path:
    from hetero_kv.rules import recipes

    found = recipes.find(name, Path())
    assert found is not None
    return found


def attempt(texts: list[str], random: randomness.Random, folder: Path) -> None:
    """A file, read as rules or as settings."""
    path = folder / "tried.yaml"
    text = _composed(random) if random.random() < 0.6 else random.choice(texts)
    path.write_bytes(mutated(text.encode(errors="surrogatepass"), random) if random.random() < 0.7 else text.encode())
    (folder / "parent.yaml").write_text(random.choice(texts[:-1]))
    if random.random() < 0.3:
        _read_settings(path)
    else:
        _read_rules(path)


def _read_settings(path: Path) -> None:
    from hetero_kv.rules.settings_file import read_settings_file, read_trusted_modules

    read_trusted_modules(path)
    for name, value in read_settings_file(path).items():
        if isinstance(value, int) and abs(value) > 1 << 63:
            raise WrongResultError(f"{name} is {value}")


def _read_rules(path: Path) -> None:
    import sys

    from torch import nn

    from hetero_kv.rules.rule_file import load_rules

    before = set(sys.modules)
    rules = load_rules(path)
    module = nn.Linear(1, 1)
    for rule in rules.rules:
        for place in PATHS:
            rule.matches(place, module)
        settings = rules.operator_settings(rule)
        if settings is not None:
            asdict(settings)
    rules.require_own_effect()
    if new := {
        name for name in set(sys.modules) - before if not name.startswith(("hetero_kv", "torch", "transformers"))
    }:
        raise WrongResultError(f"imported {sorted(new)[:5]}")


def _composed(random: randomness.Random) -> str:
    """A rules file put together from what is right and what is not."""

    def value() -> Any:
        return random.choice(VALUES)

    extends = random.choice(("quest.yaml", "parent.yaml", "tried.yaml", "[quest, dense]", value()))
    names = (
        "chunk_size",
        "max_seq_len",
        "block_size",
        "top_k_blocks",
        "kv_type",
        "budget",
        "policy",
        "x",
        value(),
    )
    block = "".join(f"  {random.choice(names)}: {value()}\n" for _ in range(random.randrange(3)))
    rules = ""
    for _ in range(random.randrange(4)):
        name = random.choice((*PATTERNS, value())).replace("'", "''")
        kwargs = random.choice(("", f", kwargs: {{{random.choice(names)}: {value()}}}"))
        rules += f"- match: {{name: '{name}'}}\n  replace: {{class: {random.choice(CLASSES)}{kwargs}}}\n"
    parts = [
        f"extends: {extends}\n",
        f"long_context:\n{block}",
        f"rules:\n{rules}",
        f"trust_rules: {value()}\n",
        f"&a\nx: {value()}\n",
    ]
    return "".join(part for part in parts if random.random() < 0.6)


CAMPAIGNS = (Campaign("rules and settings", 800, prepare, attempt),)
