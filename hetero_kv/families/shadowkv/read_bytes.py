"""How many bytes a ShadowKV step reads."""

from __future__ import annotations

from hetero_kv.families.shadowkv.layer import LowRankLayer


def read_bytes(layer: LowRankLayer, missed: int) -> float:
    """Bytes of a row that the last step has read: what it attended to, landmarks, and what missing chunks are made of.

    Those are the coefficients of their keys, a head's each, their stored values, and the basis once.

    Args:
        missed: chosen chunks that were in no slot, of all rows and heads.
    """
    keys, values = layer.recent_keys.entries, layer.recent_values.entries
    rows, kv_heads, tokens, k_dim = keys.shape
    size, outliers, of_missed = keys.element_size(), layer.context.outliers, 0
    landmarks = 0
    if outliers is not None:
        pool, basis = layer.pool, layer.factors.basis
        assert pool is not None
        assert basis is not None
        tokens += outliers.residents.tokens
        landmarks = layer.chunks * kv_heads * k_dim * size if outliers.residents.ids.shape[2] else 0
        rank, value_bytes = basis.shape[2], layer.value_storage.bytes_per_vector(values.shape[3])
        of_missed = missed * layer.chunk_size * (rank * size + value_bytes) + (basis.nbytes if missed else 0)
    return tokens * kv_heads * (k_dim + values.shape[3]) * size + landmarks + of_missed / rows
