"""Metadata that several architectures share."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models.layouts.layout import Value, setting
from tests.support.gguf_models.layouts.rotation import ROTATION

SIZES: dict[str, Value] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
HEAD: dict[str, Value] = {
    "attention.key_length": setting("head_dim"), "attention.value_length": setting("head_dim"),
}  # fmt: skip
RMS: dict[str, Value] = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
USUAL = {**SIZES, **RMS, **ROTATION, **HEAD}
VOCABULARY: dict[str, Value] = {"vocab_size": "vocab_size"}
EXPERTS: dict[str, Value] = {
    "expert_count": lambda config: getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
    "expert_used_count": "num_experts_per_tok",
}
EXPERT_WIDTH: dict[str, Value] = {"expert_feed_forward_length": "moe_intermediate_size"}
ROUTED: dict[str, Value] = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    **EXPERT_WIDTH,
}


def window_pattern(config: Any) -> list[bool] | None:
    return [kind == "sliding_attention" for kind in config.layer_types] if config.sliding_window else None
