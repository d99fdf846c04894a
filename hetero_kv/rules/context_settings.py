"""The settings of saved contexts that are in force: flags, then the settings file, then the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from hetero_kv.contexts.settings import ContextSettings
from hetero_kv.rules.precedence import COMMAND_LINE, SETTINGS_FILE, Given, in_force
from hetero_kv.rules.settings_file import read_context_settings

S = TypeVar("S", bound=ContextSettings)


def context_settings(cls: type[S], flags: Mapping[str, Any]) -> S:
    """The settings `cls`, of which `flags` were given.

    Raises ConfigError for a mistake in these, or in the settings file.
    """
    given = [Given(COMMAND_LINE, flags), Given(SETTINGS_FILE, read_context_settings())]
    return in_force(cls, given, where="contexts").settings
