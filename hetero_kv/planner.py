"""How much memory a context takes, how much there is, and so how long a context can be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hetero_kv.config import RetrievalSettings
from hetero_kv.errors import HeteroKVError
from hetero_kv.kv import storage

#: Share of the free DRAM that is left to everything else.
RESERVE = 0.1


class OutOfMemoryError(HeteroKVError):
    """The store for `max_seq_len` tokens does not fit into the DRAM that is free. Nothing was allocated."""


@dataclass(frozen=True)
class KVShape:
    """The shape of one layer's keys and values.

    Attributes:
        kv_heads: heads that are stored.
        k_dim, v_dim: their dimensions.
    """

    kv_heads: int
    k_dim: int
    v_dim: int

    @classmethod
    def of(cls, config: Any) -> KVShape:
        """From a transformers decoder config; MLA models store their expanded keys and values."""
        heads = config.num_attention_heads
        if getattr(config, "kv_lora_rank", None):
            return cls(heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(getattr(config, "num_key_value_heads", None) or heads, dim, dim)


def layer_bytes_per_token(shape: KVShape, settings: RetrievalSettings) -> float:
    """DRAM per token of one retrieval layer, bytes: key, value, and its share of the block's representatives."""
    kind = storage.get(settings.kv_type)
    vectors = kind.bytes_per_vector(shape.k_dim) + kind.bytes_per_vector(shape.v_dim)
    index = settings.representative_num * kind.bytes_per_vector(shape.k_dim) / settings.block_size
    return shape.kv_heads * (vectors + index)


def free_dram() -> int:
    """DRAM that this process may still take, bytes: what is available, within the limits of its control group."""
    return min([psutil.virtual_memory().available, *_cgroup_headroom()])


def _cgroup_headroom() -> list[int]:
    headroom = []
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in (limit_file, used_file))
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():
            headroom.append(max(0, int(limit) - int(used)))
    return headroom


def max_tokens(bytes_per_token: float, free: int | None = None) -> int:
    """Tokens that fit into the free DRAM with a reserve; `free` in bytes, measured now when None."""
    usable = (free_dram() if free is None else free) * (1 - RESERVE)
    return int(usable // bytes_per_token)


def resolve_max_seq_len(wanted: int | str, bytes_per_token: float, context_length: int, free: int | None = None) -> int:
    """The capacity in tokens that `max_seq_len` stands for.

    Args:
        wanted: tokens, or "auto": the model's context length, or what fits if that is less.
        bytes_per_token: of all layers and rows together.
        context_length: what the model was trained for, tokens.
        free: free DRAM in bytes, measured now when None.

    Raises OutOfMemoryError when it does not fit; the message says how many tokens would.
    """
    fitting = max_tokens(bytes_per_token, free) if bytes_per_token else context_length
    tokens = min(context_length, fitting) if wanted == "auto" else int(wanted)
    if tokens > fitting or tokens < 1:
        raise OutOfMemoryError(
            f"max_seq_len is {wanted}: {tokens or 1} tokens take {(tokens or 1) * bytes_per_token / 1e9:.2f} GB of "
            "DRAM, "
            f"and {(free_dram() if free is None else free) / 1e9:.2f} GB are free ({RESERVE:.0%} is kept in reserve); "
            f"max_seq_len {fitting} would fit"
        )
    return tokens
