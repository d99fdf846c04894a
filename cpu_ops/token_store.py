"""Encodes one token per sequence and stores it in its block."""

from functools import cache, lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from hetero_kv.cpu_ops.bfloat16_bits import float_to_bfloat16
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.device_function import device_function
from hetero_kv.cpu_ops.kernel_address import called_as
from hetero_kv.cpu_ops.storage import STORAGE_TYPES, numbers_of, pool_arrays, storage_of

_GROUP = 32
"""Numbers that share a scale in GGML's formats."""


@intrinsic
def _half_bits(typingctx, value):
    """Returns the bits of the IEEE binary16 nearest to a float32; ties go to even."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@device_function
def as_float32(value):
    """Returns a float32 unchanged."""
    return value


@device_function
def as_float16(value):
    """Returns the bits of a float32 as binary16."""
    return _half_bits(value)


@device_function
def as_bfloat16(value):
    """Returns the bits of a float32 as bfloat16; ties go to even."""
    return float_to_bfloat16(value)


@device_function(error_model="numpy")
def _inverse(scale):
    """Returns 1 / scale, from the scale before it is rounded, as GGML does; 0 if that exceeds float32."""
    inverse = np.float32(1) / scale
    return np.float32(0) if np.isinf(inverse) else inverse


@device_function
def _put_half(value, target, at):
    bits = _half_bits(value)
    target[at], target[at + 1] = np.uint8(bits & 255), np.uint8(bits >> 8)


@device_function(error_model="numpy")
def _as_q8_0(vector, target):
    """Encode a vector [dim] float32 as GGML's Q8_0 in target [dim / 32 * 34] uint8."""
    for group in range(vector.size // _GROUP):
        at, first = group * (_GROUP + 2), group * _GROUP
        largest = np.float32(0)
        for i in range(first, first + _GROUP):
            largest = max(largest, abs(vector[i]))
        scale = largest / np.float32(127)
        inverse = _inverse(scale)
        _put_half(scale, target, at)
        for i in range(_GROUP):
            scaled = vector[first + i] * inverse
            # Round halves away from zero, as C's roundf does.
            size = abs(scaled)
            whole = np.floor(size)
            whole += np.floor((size - whole) * np.float32(2))
            target[at + 2 + i] = np.uint8(np.int64(whole if scaled >= 0 else -whole) & 255)


@device_function(error_model="numpy")
def _as_q4_0(vector, target):
    """Encode a vector [dim] float32 as GGML's Q4_0 in target [dim / 32 * 18] uint8."""
    for group in range(vector.size // _GROUP):
        at, first = group * (_GROUP // 2 + 2), group * _GROUP
        # The number of largest magnitude becomes -8, which has no positive counterpart.
        largest = vector[first]
        for i in range(first, first + _GROUP):
            if abs(vector[i]) > abs(largest):
                largest = vector[i]
        scale = largest / np.float32(-8)
        inverse = _inverse(scale)
        _put_half(scale, target, at)
        for i in range(_GROUP // 2):
            low = min(max(vector[first + i] * inverse + np.float32(8.5), np.float32(0)), np.float32(15))
            high = min(max(vector[first + _GROUP // 2 + i] * inverse + np.float32(8.5), np.float32(0)), np.float32(15))
            target[at + 2 + i] = np.uint8(np.int64(low) | np.int64(high) << 4)


_ENCODERS = {"float32": as_float32, "float16": as_float16, "bfloat16": as_bfloat16}
_GROUP_ENCODERS = {"q8_0": _as_q8_0, "q4_0": _as_q4_0}
_NARROW = frozenset({"float16", *_GROUP_ENCODERS})
"""Types limited to float16's range, also by their float16 scales."""


@cache
def _writer(storage: str) -> Any:
    """Returns a function (vector [dim] float32, target, the vector's view of the pool) that encodes and writes."""
    if storage in _GROUP_ENCODERS:
        return _GROUP_ENCODERS[storage]
    encode = _ENCODERS[storage]

    @device_function
    def write(vector, target):
        for d in range(vector.size):
            target[d] = encode(vector[d])

    return write


def _write(storage, vector, target):
    """Call `_writer` of a storage type by its name: a kernel that closed over the function itself would get a new key
    in Numba's disk cache in every process."""
    raise NotImplementedError("for kernels alone")


@overload(_write, prefer_literal=True)
def _written(storage, vector, target):
    writer = _writer(storage.literal_value)
    return lambda storage, vector, target: writer(vector, target)


def stores(dtype: np.dtype) -> bool:
    """Whether `store_token` writes blocks of this dtype."""
    return storage_of(dtype).name in _ENCODERS.keys() | _GROUP_ENCODERS.keys()


def store_token(
    new_keys: np.ndarray,
    new_values: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    table: np.ndarray,
    position: int,
) -> float:
    """Write one token of every row into its block.

    new_keys: [rows, kv_heads, k_dim] float32, new_values: [rows, kv_heads, v_dim] float32. keys: [num_blocks, kv_heads,
    block_size, k_dim], values: [num_blocks, kv_heads, block_size, v_dim], of storage types that `stores` accepts.
    table: [rows, blocks] int32, ids of each row's blocks in order. position: of the token in its sequence.

    Returns the largest magnitude among the numbers (if the types of keys and values differ: only among those whose type
    is limited to float16's range), or infinity or NaN if there is one. Raises ValueError or TypeError for arrays that
    do not fit together, IndexError for a position or block out of range.
    """
    if position < 0:
        raise IndexError(f"position {position} must lie in the blocks of table")
    return store_tokens(new_keys, new_values, keys, values, table, np.full(len(table), position))


def store_tokens(
    new_keys: np.ndarray,
    new_values: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    table: np.ndarray,
    positions: np.ndarray,
) -> float:
    """As `store_token`, each row's token at a position of its own; rows may be tokens of one sequence.

    positions: [rows] int64; of a row with a negative one nothing is stored.
    """
    kernel, k_dtype, v_dtype = _plan(
        new_keys.shape, new_values.shape, keys.shape, values.shape, table.shape[:1], keys.dtype, values.dtype
    )
    if positions.shape != table.shape[:1]:
        raise ValueError(f"positions {positions.shape} do not fit a table of {len(table)} rows")
    largest = kernel(new_keys, new_values, keys.view(k_dtype), values.view(v_dtype), table, positions)
    if largest < 0:
        raise IndexError(
            f"position {positions.max()} must lie in the blocks of table, which are 0..{keys.shape[0] - 1}"
        )
    return largest


@lru_cache(maxsize=4096)
def _plan(
    new_keys: tuple[int, ...], new_values: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...],
    rows: tuple[int, ...], dtype: np.dtype, value_dtype: np.dtype,
) -> tuple[Any, np.dtype, np.dtype]:  # fmt: skip
    storage, value_storage = storage_of(dtype), storage_of(value_dtype)
    k_dim, v_dim = keys[3] * storage.group, values[3] * value_storage.group
    fitting = new_keys[1:] == (keys[1], k_dim) and new_values[1:] == (values[1], v_dim)
    if not fitting or not new_keys[:1] == new_values[:1] == rows or keys[:3] != values[:3]:
        raise ValueError(
            f"new_keys {new_keys}, new_values {new_values} and a table of {rows} rows do not fit keys {keys} and "
            f"values {values}"
        )
    return kernel_for(storage.name, value_storage.name), storage.kernel_dtype, value_storage.kernel_dtype


@called_as("store")
def signature(numbers: str) -> Any:
    """The kernels' signature: (new_keys, new_values, keys, values, table, positions).

    positions: [rows] int64, of each row's token in its sequence; a negative one stores nothing. Returns the result of
    `store_token`, or -1 for a position or block out of range. numbers: the dtypes as which kernels view the pool
    (`storage.numbers_of`).
    """
    real3, int2 = types.Array(types.float32, 3, "C"), types.Array(types.int32, 2, "C")
    return types.float32(real3, real3, *pool_arrays(numbers), int2, types.Array(types.int64, 1, "C"))


@cache
def kernel_for(storage: str, value_storage: str) -> Any:
    """Compile the kernel of `store_token` for these types, or load it from Numba's on-disk cache."""
    measures_keys, measures_values = (storage == value_storage or each in _NARROW for each in (storage, value_storage))
    numbers, code_version = numbers_of(STORAGE_TYPES[storage], STORAGE_TYPES[value_storage]), CODE_VERSION

    @njit(signature(numbers), cache=True, nogil=True)
    def store(new_keys, new_values, keys, values, table, positions):
        rows, kv_heads, k_dim = new_keys.shape
        v_dim = new_values.shape[2]
        largest = np.float32(0 * code_version)
        for row in range(rows):
            index = positions[row] // keys.shape[2]
            if index >= table.shape[1] or (index >= 0 and not 0 <= table[row, index] < keys.shape[0]):
                return np.float32(-1)
        for row in range(rows):
            if positions[row] < 0:
                continue
            block, offset = table[row, positions[row] // keys.shape[2]], positions[row] % keys.shape[2]
            for head in range(kv_heads):
                for d in range(k_dim):
                    value = new_keys[row, head, d]
                    size = abs(value)
                    if (size > largest and (measures_keys or np.isinf(size))) or np.isnan(size):
                        largest = size
                _write(storage, new_keys[row, head], keys[block, head, offset])
                for d in range(v_dim):
                    value = new_values[row, head, d]
                    size = abs(value)
                    if (size > largest and (measures_values or np.isinf(size))) or np.isnan(size):
                        largest = size
                _write(value_storage, new_values[row, head], values[block, head, offset])
        return largest

    return store
