"""Checks of the arrays of attention kernels, and their error messages."""

import numpy as np

from hetero_kv.cpu_ops.storage import NumberFormat, storage_of
from hetero_kv.cpu_ops.work_division import BAD_COUNT, BAD_ID


def check_lists(
    q: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...], ids: tuple[int, ...], counts: tuple[int, ...],
    lengths: tuple[int, ...], dtype: np.dtype, value_dtype: np.dtype,
) -> tuple[NumberFormat, NumberFormat, int]:  # fmt: skip
    """Returns the storage types of keys and values, and v_dim, for arrays of these shapes (as in `attend_blocks`).

    q: [rows, kv_heads, group, k_dim].

    Raises ValueError or TypeError for arrays that do not fit together.
    """
    if len(q) != 4 or len(keys) != 4 or len(values) != 4:
        raise ValueError(f"q {q}, keys {keys} and values {values} must have four dimensions each")
    storage, value_storage = _storage_of("keys", dtype), _storage_of("values", value_dtype)
    rows, kv_heads, group, k_dim = q
    num_blocks, _, block_size, _ = keys
    v_dim = values[3] * value_storage.group
    if keys[1] != kv_heads or keys[3] * storage.group != k_dim:
        raise ValueError(f"keys {keys} do not fit q {q}: kv_heads (second) and k_dim (last) must be equal")
    if values[:3] != keys[:3]:
        raise ValueError(f"values {values} do not fit keys {keys}: all but the last dimension must be equal")
    if min(group, k_dim, values[3], block_size) < 1:
        raise ValueError(f"q {q}, keys {keys}, values {values}: group, dims and block_size must be at least 1")
    if len(ids) != 3 or ids[0] != rows or ids[1] not in (1, kv_heads) or counts != ids[:2]:
        raise ValueError(
            f"block_ids {ids} must be [{rows}, 1 or {kv_heads}, max_blocks], block_counts {counts} its first two dims"
        )
    if lengths != (num_blocks,):
        raise ValueError(f"block_lengths {lengths} must hold one entry for each of the {num_blocks} blocks")
    return storage, value_storage, v_dim


def check_offsets(offsets: tuple[int, ...] | None, keys: tuple[int, ...], k_dim: int) -> None:
    """Raise ValueError if `key_offsets` of shape `offsets` do not fit keys of shape `keys`."""
    if offsets is not None and offsets != (*keys[:2], k_dim):
        raise ValueError(f"key_offsets {offsets} do not fit keys {keys}: they must be {(*keys[:2], k_dim)}")


def _storage_of(name: str, dtype: np.dtype) -> NumberFormat:
    try:
        return storage_of(dtype)
    except TypeError as error:
        raise TypeError(f"{name} are {dtype}: {error}") from None


def wrong_array(*arrays: np.ndarray) -> str:
    """Returns the error message for arrays of `attend_blocks`, q to lse, that a kernel refused."""
    names = ("q", "keys", "values", "block_ids", "block_counts", "block_lengths", "out", "lse")
    dtypes = [np.float32, arrays[1].dtype, arrays[2].dtype, np.int32, np.int32, np.int32, np.float32, np.float32]
    wrong = [
        f"{name} is {array.dtype}, {'' if array.flags.c_contiguous else 'not '}C-contiguous"
        + ("" if array.flags.writeable else ", read-only")
        for name, array, dtype in zip(names, arrays, dtypes, strict=True)
        if array.dtype != dtype or not array.flags.c_contiguous or not array.flags.writeable
    ]
    return f"{'; '.join(wrong)}: expected writeable C-contiguous arrays, float32 and (ids, counts, lengths) int32"


def outside_pool(status: int, keys: np.ndarray, ids: np.ndarray, counts: np.ndarray, lengths: np.ndarray) -> str:
    """Returns the error message for lists that a kernel refused with `status` (`cpu_ops.work_division`)."""
    if status == BAD_COUNT:
        return f"block_counts range over {counts.min()}..{counts.max()}; lists hold 0..{ids.shape[2]} entries"
    if status == BAD_ID:
        return f"block_ids name a block outside the pool's 0..{keys.shape[0] - 1}"
    return f"block_lengths of attended blocks must lie in 0..{keys.shape[2]} (block_size)"


def check_chunk(q: np.ndarray, past_k: np.ndarray, past_v: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Raise ValueError unless these arrays of a chunk fit together (as in `prompt_attention.attend_prompt`)."""
    batch, heads, n, k_dim = q.shape
    kv_heads, v_dim, past = k.shape[1], v.shape[3], past_k.shape[2]
    if (
        k.shape != (batch, kv_heads, n, k_dim)
        or v.shape != (batch, kv_heads, n, v_dim)
        or past_k.shape != (batch, kv_heads, past, k_dim)
        or past_v.shape != (batch, kv_heads, past, v_dim)
        or heads % kv_heads
        or min(q.shape) < 1
    ):
        raise ValueError(f"q {q.shape}, past {past_k.shape} {past_v.shape}, k {k.shape} and v {v.shape} do not fit")
