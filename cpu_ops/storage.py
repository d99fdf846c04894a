"""Storage types of cached keys and values, and how a kernel reads each of them.

A storage type is registered with one function that emits LLVM IR for "load these elements as float32". Kernels are
generated per storage type, so a new one costs one function here and nothing anywhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

Decode = Callable[[ir.IRBuilder, ir.Value, int], ir.Value]
FLOAT = ir.FloatType()


@dataclass(frozen=True)
class StorageType:
    """One element type of a block pool.

    name: the name settings use. dtype: numpy dtype of the pool. kernel_dtype: the dtype its memory is viewed as inside
    kernels. decode: emits `lanes` elements at a pointer as a vector of float32.
    """

    name: str
    dtype: np.dtype
    kernel_dtype: np.dtype
    decode: Decode


STORAGE_TYPES: dict[str, StorageType] = {}
_BY_DTYPE: dict[np.dtype, StorageType] = {}


def register_storage(name: str, dtype: Any, kernel_dtype: Any) -> Callable[[Decode], Decode]:
    """Register the decorated function as the decoder of storage type `name`."""

    def register(decode: Decode) -> Decode:
        storage = StorageType(name, np.dtype(dtype), np.dtype(kernel_dtype), decode)
        STORAGE_TYPES[name] = storage
        _BY_DTYPE[storage.dtype] = storage
        return decode

    return register


def storage_of(dtype: np.dtype) -> StorageType:
    """The storage type of a pool of this dtype.

    Raises TypeError when no storage type of that dtype is registered.
    """
    storage = _BY_DTYPE.get(dtype)
    if storage is None:
        known = ", ".join(str(each) for each in _BY_DTYPE)
        raise TypeError(f"no kernel reads blocks of dtype {dtype}; store them as one of: {known}")
    return storage


@register_storage("float32", np.float32, np.float32)
def decode_float32(builder: ir.IRBuilder, pointer: ir.Value, lanes: int) -> ir.Value:
    """Load `lanes` float32 as they are."""
    vector = ir.VectorType(FLOAT, lanes)
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4, typ=vector)


@register_storage("float16", np.float16, np.uint16)
def decode_float16(builder: ir.IRBuilder, pointer: ir.Value, lanes: int) -> ir.Value:
    """Widen `lanes` IEEE binary16: numba has no such type on CPUs, LLVM has, and x86 does it in one `vcvtph2ps`."""
    bits = ir.VectorType(ir.IntType(16), lanes)
    loaded = builder.load(builder.bitcast(pointer, bits.as_pointer()), align=2, typ=bits)
    return builder.fpext(builder.bitcast(loaded, ir.VectorType(ir.HalfType(), lanes)), ir.VectorType(FLOAT, lanes))
