"""The registry of choosers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_kv.families.token_retrieval.choosers.settings import TokenSettings
from hetero_kv.settings.registry import Registry

if TYPE_CHECKING:
    from hetero_kv.families.token_retrieval.choosers.chooser import Chooser

CHOOSERS: Registry[TokenSettings, Chooser] = Registry("chooser", "a way to choose tokens")

register, names, get = CHOOSERS.register, CHOOSERS.names, CHOOSERS.get
