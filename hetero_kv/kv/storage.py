"""Storage types: how keys and values lie in DRAM.

A new storage type is one `register` call here and one decode function of the same name in `cpu_ops`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_kv.errors import HeteroKVError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StorageType:
    """One number format of the block pool.

    Attributes:
        name: as written in YAML (`kv_type`).
        element: name of the torch dtype of one stored element.
        bytes_per_element: of one stored element.
        meaning: one line for `--help` and the documentation.
        largest: the largest number it can hold; None where that is beyond any key or value.
    """

    name: str
    element: str
    bytes_per_element: int
    meaning: str
    largest: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of one stored element."""
        # `--help` lists the storage types, and torch takes a second to import.
        return getattr(importlib.import_module("torch"), self.element)

    def bytes_per_vector(self, dim: int) -> int:
        """Bytes that one stored vector of `dim` elements takes."""
        return dim * self.bytes_per_element


_REGISTRY: dict[str, StorageType] = {}


def register(storage: StorageType) -> StorageType:
    """Make a storage type known under its name."""
    _REGISTRY[storage.name] = storage
    return storage


def names() -> tuple[str, ...]:
    """The registered names, in order of registration."""
    return tuple(_REGISTRY)


def get(name: str) -> StorageType:
    """The storage type called `name`. Raises HeteroKVError for an unknown one."""
    if name not in _REGISTRY:
        raise HeteroKVError(f"kv_type {name!r} is not a storage type; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


FP16 = register(StorageType("FP16", "float16", 2, "half precision: 2 bytes per element", largest=65504.0))
FP32 = register(StorageType("FP32", "float32", 4, "single precision: 4 bytes per element, exact for fp32 models"))
