"""Resolves the settings of saved contexts: flags win over the settings file, which wins over the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from hetero_kv.contexts.settings import ContextSettings
from hetero_kv.rules.precedence import COMMAND_LINE, SETTINGS_FILE, SettingsSource, in_force
from hetero_kv.rules.settings_file import read_context_settings

S = TypeVar("S", bound=ContextSettings)


def context_settings(cls: type[S], flags: Mapping[str, Any]) -> S:
    """The settings `cls` in force, with `flags` from the command line.

    Raises ConfigError for a mistake in the flags or in the settings file.
    """
    sources = [SettingsSource(COMMAND_LINE, flags), SettingsSource(SETTINGS_FILE, read_context_settings())]
    return in_force(cls, sources, where="contexts").settings
