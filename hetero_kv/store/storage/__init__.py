"""Storage types: the number formats of keys and values in DRAM.

A new storage type is one file here, imported below, and the function of its `kernel` name in `cpu_ops.storage`, which
reads it in a kernel.
"""

from hetero_kv.store.storage.ggml import Q4_0, Q8_0
from hetero_kv.store.storage.plain import BF16, FP16, FP32
from hetero_kv.store.storage.registry import StorageType, get, names, register

__all__ = ["BF16", "FP16", "FP32", "Q4_0", "Q8_0", "StorageType", "get", "names", "register"]
