"""Storage types of cached keys and values, and their decoders for kernels.

A storage type is registered with one function that emits LLVM IR to load elements as float32. Kernels are generated per
storage type, so that reading a new type needs one function here. A kernel that stores it needs one in `token_store`.

A pool's numpy dtype identifies its storage type. Formats without a numpy number are records: one record stores a group
of values, so that a vector of `dim` values takes `dim // group` records.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types

Decode = Callable[[ir.IRBuilder, ir.Value, int, int], ir.Value]
"""(builder, pointer to a group, index of the first value within the group, lanes) -> vector of `lanes` float32."""
FLOAT = ir.FloatType()
_BYTE = ir.IntType(8)

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", (32,))])
"""GGML's Q8_0: 32 values, each scale * int8."""
Q4_0 = np.dtype([("scale", "<f2"), ("values", "u1", (16,))])
"""GGML's Q4_0: 32 values, each scale * (nibble - 8); byte i has value i in its low and i + 16 in its high nibble."""


@dataclass(frozen=True)
class NumberFormat:
    """One number format of a block pool.

    name: as in settings. dtype: numpy dtype of one group of values in the pool. group: values of a group.
    kernel_dtype: the dtype as which kernels view the memory. decode: see `Decode`.
    """

    name: str
    dtype: np.dtype
    group: int
    kernel_dtype: np.dtype
    decode: Decode

    def units(self, values: int) -> int:
        """Returns the number of `kernel_dtype` elements of `values` stored values, a multiple of `group`."""
        return values // self.group * (self.dtype.itemsize // self.kernel_dtype.itemsize)


STORAGE_TYPES: dict[str, NumberFormat] = {}
_BY_DTYPE: dict[np.dtype, NumberFormat] = {}


def register_storage(name: str, dtype: Any, kernel_dtype: Any, group: int = 1) -> Callable[[Decode], Decode]:
    """Register the decorated function as the decoder of storage type `name`."""

    def register(decode: Decode) -> Decode:
        storage = NumberFormat(name, np.dtype(dtype), group, np.dtype(kernel_dtype), decode)
        STORAGE_TYPES[name] = storage
        _BY_DTYPE[storage.dtype] = storage
        return decode

    return register


def storage_of(dtype: np.dtype) -> NumberFormat:
    """Returns the storage type of a pool of this dtype.

    Raises TypeError if no storage type of that dtype is registered.
    """
    storage = _BY_DTYPE.get(dtype)
    if storage is None:
        known = ", ".join(str(each) for each in _BY_DTYPE)
        raise TypeError(f"no kernel reads blocks of dtype {dtype}; store them as one of: {known}")
    return storage


def numbers_of(keys: NumberFormat, values: NumberFormat) -> str:
    """Returns the kernel variant for keys and values of these types: "kernel dtype of keys,kernel dtype of values"."""
    return f"{keys.kernel_dtype.name},{values.kernel_dtype.name}"


def pool_arrays(numbers: str, dims: int = 4) -> tuple[Any, Any]:
    """Returns Numba's array types of keys and values as kernels view them, for a variant from `numbers_of`."""
    keys, values = (types.Array(from_dtype(np.dtype(each)), dims, "C") for each in numbers.split(","))
    return keys, values


def _load_vector(builder: ir.IRBuilder, pointer: ir.Value, element: ir.Type, lanes: int, align: int) -> ir.Value:
    vector = ir.VectorType(element, lanes)
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=align, typ=vector)


def _splat(value: Any, lanes: int) -> ir.Constant:
    kind = FLOAT if isinstance(value, float) else _BYTE
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def _scale(builder: ir.IRBuilder, group: ir.Value, lanes: int) -> ir.Value:
    """Returns a GGML group's float16 scale, its first two bytes, in every lane.

    All lanes are widened: for one alone, x86 inserts it into a register, and waits for whatever wrote that one before.
    """
    short = builder.load(builder.bitcast(group, ir.IntType(16).as_pointer()), align=2)
    vector = ir.VectorType(short.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), short, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    every = builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)
    return builder.fpext(builder.bitcast(every, ir.VectorType(ir.HalfType(), lanes)), ir.VectorType(FLOAT, lanes))


@register_storage("float32", np.float32, np.float32)
def decode_float32(builder: ir.IRBuilder, pointer: ir.Value, within: int, lanes: int) -> ir.Value:
    """Load `lanes` float32."""
    return _load_vector(builder, pointer, FLOAT, lanes, align=4)


@register_storage("float16", np.float16, np.uint16)
def decode_float16(builder: ir.IRBuilder, pointer: ir.Value, within: int, lanes: int) -> ir.Value:
    """Widen `lanes` IEEE binary16. Numba lacks this type on CPUs, LLVM has it; on x86 it is one `vcvtph2ps`."""
    loaded = _load_vector(builder, pointer, ir.IntType(16), lanes, align=2)
    return builder.fpext(builder.bitcast(loaded, ir.VectorType(ir.HalfType(), lanes)), ir.VectorType(FLOAT, lanes))


@register_storage("bfloat16", BFLOAT16, np.uint16)
def decode_bfloat16(builder: ir.IRBuilder, pointer: ir.Value, within: int, lanes: int) -> ir.Value:
    """Widen `lanes` bfloat16, whose bits are the upper half of a float32."""
    word = ir.VectorType(ir.IntType(32), lanes)
    wide = builder.zext(_load_vector(builder, pointer, ir.IntType(16), lanes, align=2), word)
    return builder.bitcast(builder.shl(wide, ir.Constant(word, [16] * lanes)), ir.VectorType(FLOAT, lanes))


@register_storage("q8_0", Q8_0, np.uint8, group=32)
def decode_q8_0(builder: ir.IRBuilder, pointer: ir.Value, within: int, lanes: int) -> ir.Value:
    """Widen `lanes` of the 32 signed bytes that follow the group's scale, and scale them."""
    at = builder.gep(pointer, [ir.Constant(ir.IntType(64), 2 + within)])
    whole = builder.sext(_load_vector(builder, at, _BYTE, lanes, align=1), ir.VectorType(ir.IntType(32), lanes))
    return builder.fmul(builder.sitofp(whole, ir.VectorType(FLOAT, lanes)), _scale(builder, pointer, lanes))


@register_storage("q4_0", Q4_0, np.uint8, group=32)
def decode_q4_0(builder: ir.IRBuilder, pointer: ir.Value, within: int, lanes: int) -> ir.Value:
    """Widen `lanes` of the 32 nibbles that follow the group's scale, subtract 8, and scale them."""
    at = builder.gep(pointer, [ir.Constant(ir.IntType(64), 2 + within % 16)])
    loaded = _load_vector(builder, at, _BYTE, lanes, align=1)
    nibbles = builder.and_(loaded, _splat(15, lanes)) if within < 16 else builder.lshr(loaded, _splat(4, lanes))
    # Subtracting 8 from bytes is exact, and leaves a single multiplication in float32.
    signed = builder.sext(builder.sub(nibbles, _splat(8, lanes)), ir.VectorType(ir.IntType(32), lanes))
    return builder.fmul(builder.sitofp(signed, ir.VectorType(FLOAT, lanes)), _scale(builder, pointer, lanes))
