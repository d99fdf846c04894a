"""Choosers of tokens, one file each. All modules of this package are imported, so adding a file registers it."""

import importlib
import pkgutil

from hetero_kv.families.token_retrieval.choosers.chooser import Chooser, ContextAttention, TokenQuery
from hetero_kv.families.token_retrieval.choosers.registry import get, names, register
from hetero_kv.families.token_retrieval.choosers.settings import TokenSettings, chooser_setting

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Chooser",
    "ContextAttention",
    "TokenQuery",
    "TokenSettings",
    "chooser_setting",
    "get",
    "names",
    "register",
]
