"""Long contexts on ordinary machines: KV blocks in DRAM, sparse attention on the CPU, methods as YAML rules."""

from hetero_kv.errors import HeteroKVError
from hetero_kv.inject import Injection, eject, inject
from hetero_kv.kv.cache import HeteroCache
from hetero_kv.rules import load_rules

__all__ = ["HeteroCache", "HeteroKVError", "Injection", "eject", "inject", "load_rules"]
