"""Eviction policies, one file each. All modules of this package are imported, so adding a file registers it."""

import importlib
import pkgutil

from hetero_kv.families.bounded.eviction.policy import EvictionPolicy, ObservedAttention
from hetero_kv.families.bounded.eviction.registry import get, names, register
from hetero_kv.families.bounded.eviction.settings import (
    BoundedSettings,
    StridedSettings,
    WholePromptSettings,
    policy_setting,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "BoundedSettings",
    "EvictionPolicy",
    "ObservedAttention",
    "StridedSettings",
    "WholePromptSettings",
    "get",
    "names",
    "policy_setting",
    "register",
]
