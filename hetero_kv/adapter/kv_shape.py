"""The shape of one layer's keys and values, read from a model's structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KVShape:
    """The shape of one layer's keys and values.

    Attributes:
        kv_heads: number of stored heads.
        k_dim, v_dim: their dimensions.
    """

    kv_heads: int
    k_dim: int
    v_dim: int

    @classmethod
    def of(cls, config: Any) -> KVShape:
        """The shape in a transformers decoder config; MLA models (DeepSeek) store their expanded keys and values.

        Models of states alone (Mamba) have no heads, and all sizes are 0.
        """
        heads = getattr(config, "num_attention_heads", None)
        if heads is None:
            return cls(0, 0, 0)
        if getattr(config, "kv_lora_rank", None):
            return cls(heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
        return cls(kv_heads, dim, getattr(config, "v_head_dim", None) or dim)

    @classmethod
    def of_attention(cls, attention: Any, config: Any) -> KVShape:
        """The shape in one attention module, which is more exact than the config: layers may differ (Gemma 4, MiMo)."""
        if getattr(config, "kv_lora_rank", None):
            return cls.of(config)
        k_proj, v_proj = (getattr(attention, name, None) for name in ("k_proj", "v_proj"))
        head_dim = getattr(attention, "head_dim", None)
        # Gemma 4 has layers that use their keys as values.
        rows = [getattr(projection, "out_features", None) for projection in (k_proj, v_proj or k_proj)]
        if head_dim and isinstance(rows[0], int) and isinstance(rows[1], int) and rows[0] % head_dim == 0:
            kv_heads = rows[0] // head_dim
            return cls(kv_heads, head_dim, rows[1] // kv_heads)
        # The projections are one matrix; every module with grouped queries has the size of a group.
        shape = cls.of(config)
        return cls(
            config.num_attention_heads // getattr(attention, "num_key_value_groups", 1), shape.k_dim, shape.v_dim
        )

    def bytes_per_token(self, element: int) -> int:
        """Keys and values of one token in one layer, bytes, at `element` bytes a number."""
        return self.kv_heads * (self.k_dim + self.v_dim) * element
