"""Eviction policies, one file each; `policy_settings` declares them, so that each is imported on first use."""

from hetero_kv.families.bounded.eviction import policy_settings as _policy_settings  # noqa: F401
from hetero_kv.families.bounded.eviction.registry import get, names, register
from hetero_kv.families.bounded.eviction.settings import (
    BoundedSettings,
    StridedSettings,
    WholePromptSettings,
    policy_setting,
)

__all__ = [
    "BoundedSettings",
    "StridedSettings",
    "WholePromptSettings",
    "get",
    "names",
    "policy_setting",
    "register",
]
