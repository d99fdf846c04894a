"""The registry of eviction policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_kv.families.bounded.eviction.settings import BoundedSettings
from hetero_kv.settings.registry import Registry

if TYPE_CHECKING:
    from hetero_kv.families.bounded.eviction.policy import EvictionPolicy

POLICIES: Registry[BoundedSettings, EvictionPolicy] = Registry("policy", "an eviction policy")

register, names, get = POLICIES.register, POLICIES.names, POLICIES.get
