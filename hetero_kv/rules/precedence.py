"""Which settings win: command line, rules file, settings file, the defaults of the fields (see `merge`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.setting import Settings, canonical, describe

ALL_LONG_CONTEXT: tuple[type[Settings], ...] = (EngineSettings, RetrievalSettings)
"""The classes whose fields the flat `long_context:` block of rules files and of the settings file may hold."""


def split_long_context(mapping: Mapping[Any, Any] | None, *, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A `long_context:` block as overrides of EngineSettings and of RetrievalSettings, under the fields' own names.

    Raises:
        ConfigError: what `canonical` refuses, calling the place `where`.
    """
    overrides = canonical(ALL_LONG_CONTEXT, mapping, where=where)
    engine, retrieval = ({row.name for row in describe(cls)} for cls in ALL_LONG_CONTEXT)
    return (
        {name: value for name, value in overrides.items() if name in engine},
        {name: value for name, value in overrides.items() if name in retrieval},
    )


def merge(
    *,
    command_line: Mapping[str, Any] | None = None,
    rules_file: Mapping[str, Any] | None = None,
    settings_file: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The overrides in force, by precedence; each mapping holds settings under their own names (see `canonical`)."""
    return {**(settings_file or {}), **(rules_file or {}), **(command_line or {})}
