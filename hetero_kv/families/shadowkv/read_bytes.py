"""The bytes that a ShadowKV step reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_kv.families.shadowkv.layer import LowRankLayer


def read_bytes(layer: LowRankLayer, missed: int) -> float:
    """Bytes per row that the last step has read: attended tokens, landmarks, and the sources of missing chunks.

    The sources are the keys' coefficients, once per head, the stored values, and the basis once.

    Args:
        missed: chosen chunks that were in no slot, over all rows and heads.
    """
    keys, values = layer.recent_keys.entries, layer.recent_values.entries
    rows, kv_heads, tokens, k_dim = keys.shape
    size, outliers = keys.element_size(), layer.context.outliers
    landmarks = 0
    if outliers is not None:
        tokens += outliers.residents.tokens
        landmarks = layer.chunks * kv_heads * k_dim * size if outliers.residents.ids.shape[2] else 0
    return tokens * kv_heads * (k_dim + values.shape[3]) * size + landmarks + bytes_of_missed(layer, missed, rows)


def bytes_of_missed(layer: LowRankLayer, missed: int, rows: int) -> float:
    """Bytes per row that are read to load a step's missing chunks.

    Args:
        missed: their number, over all rows of the step.
    """
    if not missed:
        return 0.0
    basis, values = layer.factors.basis, layer.recent_values.entries
    assert basis is not None
    per_token = basis.shape[2] * basis.element_size() + layer.value_storage.bytes_per_vector(values.shape[3])
    return missed / rows * layer.chunk_size * per_token + basis.nbytes / len(basis)
