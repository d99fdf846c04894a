"""Choosers of tokens, one file each; `chooser_settings` declares them, so that each is imported on first use."""

from hetero_kv.families.token_retrieval.choosers import chooser_settings as _chooser_settings  # noqa: F401
from hetero_kv.families.token_retrieval.choosers.registry import get, names, register
from hetero_kv.families.token_retrieval.choosers.settings import TokenSettings, chooser_setting

__all__ = [
    "TokenSettings",
    "chooser_setting",
    "get",
    "names",
    "register",
]
