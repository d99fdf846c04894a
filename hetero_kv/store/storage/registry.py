"""The base class of storage types, and their registry."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_kv.errors import HeteroKVError

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class StorageType:
    """One number format of the block pool; stored vectors are arrays of a torch dtype.

    Attributes:
        name: its name in YAML (`kv_type`).
        kernel: its name in `cpu_ops.storage`.
        element: name of the torch dtype of one stored element.
        element_bytes: bytes of one stored element.
        meaning: one line for `--help` and the documentation.
        largest: the largest number that it represents; None if no key or value exceeds it.
    """

    name: str
    kernel: str
    element: str
    element_bytes: int
    meaning: str
    largest: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of one stored element."""
        # Imported here because `--help` lists the storage types, and importing torch takes a second.
        return getattr(importlib.import_module("torch"), self.element)

    @property
    def kernel_dtype(self) -> np.dtype:
        """The numpy dtype that kernels use."""
        return importlib.import_module("hetero_kv.cpu_ops.storage").STORAGE_TYPES[self.kernel].dtype

    @property
    def is_plain(self) -> bool:
        """Whether stored elements are the numbers themselves."""
        return True

    @property
    def for_representatives(self) -> StorageType:
        """The storage type for representatives of keys of this type."""
        return self

    def takes(self, dim: int) -> bool:
        """Whether vectors of dimension `dim` can be stored."""
        return True

    @property
    def is_coarse(self) -> bool:
        """Whether a component that all keys of a channel share costs the remainder noticeable precision."""
        return False

    @property
    def block_multiple(self) -> int:
        """`block_size` must be a multiple of this."""
        return 1

    def elements(self, dim: int) -> int:
        """Stored elements of a vector of `dim` numbers. Raises HeteroKVError for unsupported dimensions."""
        return dim

    def bytes_per_vector(self, dim: int) -> int:
        """Bytes of a stored vector of `dim` numbers. Raises HeteroKVError for unsupported dimensions."""
        return self.elements(dim) * self.element_bytes

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """[..., dim] of any float dtype on any device -> [..., elements(dim)] of `dtype`, on the same device."""
        return vectors.to(self.dtype)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """[..., elements(dim)] of `dtype` -> [..., dim] of a float dtype that represents all of them exactly."""
        return stored

    def write(self, target: torch.Tensor, vectors: torch.Tensor) -> None:
        """Store vectors [..., dim] of any float dtype, from any device, in `target` [..., elements(dim)]."""
        if vectors.device != target.device:
            # Through separate memory: CUDA refuses copies into a partly page-locked range, and a pool can be one.
            vectors = vectors.to(target.dtype).to(target.device)
        # If both are in DRAM, torch converts during the copy, without a converted temporary.
        target.copy_(vectors)


_REGISTRY: dict[str, StorageType] = {}


def register(storage: StorageType) -> StorageType:
    """Register a storage type under its name."""
    _REGISTRY[storage.name] = storage
    return storage


def names() -> tuple[str, ...]:
    """The registered names, in order of registration."""
    return tuple(_REGISTRY)


def get(name: str) -> StorageType:
    """Returns the storage type called `name`. Raises HeteroKVError for an unknown one."""
    if name not in _REGISTRY:
        raise HeteroKVError(f"kv_type {name!r} is not a storage type; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]
