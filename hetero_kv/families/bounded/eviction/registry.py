"""The registry of eviction policies."""

from hetero_kv.families.bounded.eviction.policy import EvictionPolicy
from hetero_kv.families.bounded.eviction.settings import BoundedSettings
from hetero_kv.settings.registry import Registry

POLICIES: Registry[BoundedSettings, EvictionPolicy] = Registry("policy", "an eviction policy")

register, names, get = POLICIES.register, POLICIES.names, POLICIES.get
