"""What a storage type is, and which there are."""

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
    """One number format of the block pool: vectors as arrays whose elements torch has a dtype for.

    Attributes:
        name: as written in YAML (`kv_type`).
        kernel: its name in `cpu_ops.storage`.
        element: name of the torch dtype of one stored element.
        element_bytes: of one stored element.
        meaning: one line for `--help` and the documentation.
        largest: the largest number it can hold; None where that is beyond any key or value.
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
        # `--help` lists the storage types, and torch takes a second to import.
        return getattr(importlib.import_module("torch"), self.element)

    @property
    def kernel_dtype(self) -> np.dtype:
        """The numpy dtype by which kernels know it."""
        return importlib.import_module("cpu_ops.storage").STORAGE_TYPES[self.kernel].dtype

    @property
    def is_plain(self) -> bool:
        """Whether stored elements are the numbers themselves."""
        return True

    @property
    def for_representatives(self) -> StorageType:
        """The type in which representatives of such keys are stored."""
        return self

    def takes(self, dim: int) -> bool:
        """Whether vectors of dimension `dim` can be stored so."""
        return True

    @property
    def is_coarse(self) -> bool:
        """Whether a number that all keys of a channel share costs the rest of them precision that matters."""
        return False

    @property
    def block_multiple(self) -> int:
        """What `block_size` must be a multiple of."""
        return 1

    def elements(self, dim: int) -> int:
        """Stored elements of a vector of `dim` numbers. Raises HeteroKVError for one that it cannot store."""
        return dim

    def bytes_per_vector(self, dim: int) -> int:
        """Bytes that one stored vector of `dim` numbers takes. Raises HeteroKVError for one that it cannot store."""
        return self.elements(dim) * self.element_bytes

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """[..., dim] of any float dtype on any device -> [..., elements(dim)] of `dtype`, on the same device."""
        return vectors.to(self.dtype)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """[..., elements(dim)] of `dtype` -> [..., dim] of a float dtype that holds them all exactly."""
        return stored

    def write(self, target: torch.Tensor, vectors: torch.Tensor) -> None:
        """Store vectors [..., dim] of any float dtype, from any device, in `target` [..., elements(dim)]."""
        if vectors.device != target.device:
            # Through memory of its own: CUDA refuses to copy into a range that is page-locked in part, as a pool is.
            vectors = vectors.to(target.dtype).to(target.device)
        # Where both are in DRAM torch converts while it copies, without a converted copy in between.
        target.copy_(vectors)


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
