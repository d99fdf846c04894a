"""Rules as text, and the errors that they cause."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from hetero_kv.errors import ConfigError
from hetero_kv.rules.rule_file import load_rules, parse_rules


def rule_text(match: str = "{name: x}", replace: str = "{class: default}", more: str = "") -> str:
    return f"rules:\n  - match: {match}\n    replace: {replace}\n    {more}\n"


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def error_of(content: Any, source: str = "rules.yaml", trust_rules: Collection[str] = ()) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_rules(content, source, trust_rules)
    return str(raised.value)


def load_error(path: Path | str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_rules(path)
    return str(raised.value)
