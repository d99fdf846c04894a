"""DeepSeek's multi-head latent attention."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import RMS, ROUTED, SIZES, VOCABULARY
from tests.support.gguf_models.layouts.layout import Layout, Place, Value, always, setting
from tests.support.gguf_models.layouts.names import ATTENTION, GATED, MIXED, MODEL, NORMS, SHARED
from tests.support.gguf_models.layouts.rotation import ROTATION, longrope_factors, scaled


def _is_older(config: Any) -> bool:
    return bool(getattr(config, "is_of_older_converter", False))


def _key_length(config: Any) -> int:
    return int(config.qk_head_dim if _is_older(config) else config.kv_lora_rank + config.qk_rope_head_dim)


def _multiplier(config: Any) -> float | None:
    multiplier = scaled("yarn", "mscale_all_dim")(config)  # type: ignore[operator]
    return None if multiplier is None else 0.1 * float(multiplier)


def dense_layers(config: Any) -> int:
    """How many layers have no experts; they are the first."""
    return int(config.mlp_layer_types.count("dense"))


KEYS: dict[str, Value] = {
    **SIZES,
    **RMS,
    **ROTATION,
    **VOCABULARY,
    **ROUTED,
    "expert_weights_norm": lambda config: config.norm_topk_prob or None,
    "rope.scaling.yarn_log_multiplier": _multiplier,
    "rope.dimension_count": "qk_rope_head_dim",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.head_count_kv": lambda config: config.num_attention_heads if _is_older(config) else 1,
    "attention.key_length": _key_length,
    "attention.value_length": lambda config: config.v_head_dim if _is_older(config) else config.kv_lora_rank,
    "attention.key_length_mla": lambda config: None if _is_older(config) else config.qk_head_dim,
    "attention.value_length_mla": lambda config: None if _is_older(config) else config.v_head_dim,
}
LAYER: dict[str, Place] = {
    **NORMS,
    **ATTENTION,
    **GATED,
    **MIXED,
    **SHARED,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj.weight": ("", changes.latent_keys_and_values),
}

INDEXER: dict[str, Place] = {
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}
INDEXER_KEYS: dict[str, Value] = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "deepseek_v3": Layout("deepseek2", {**KEYS, "expert_gating_func": always(2)}, LAYER, MODEL, pre="deepseek-v3"),
    "deepseek_v2": Layout("deepseek2", {**KEYS, "expert_gating_func": always(1)}, LAYER, MODEL, pre="deepseek-llm"),
    "glm4_moe_lite": Layout(
        "deepseek2",
        {**KEYS, "expert_gating_func": always(2), "leading_dense_block_count": dense_layers},
        LAYER,
        MODEL,
        pre="glm4",
    ),
    "deepseek_v32": Layout(
        "deepseek32",
        {**KEYS, **INDEXER_KEYS, "expert_gating_func": always(2)},
        {**LAYER, **INDEXER},
        MODEL,
        pre="deepseek-v3",
    ),
    "glm_moe_dsa": Layout(
        "glm-dsa",
        {
            **KEYS,
            **INDEXER_KEYS,
            "expert_gating_func": always(2),
            "attention.indexer.types": lambda config: [kind == "full" for kind in config.indexer_types],
        },
        {**LAYER, **INDEXER},
        MODEL,
        pre="glm4",
    ),
    "mistral4": Layout(
        "mistral4",
        {**KEYS, "expert_gating_func": always(1)},
        {**LAYER, "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight"},
        MODEL,
        pre="tekken",
    ),
    # Of parameters in Mistral's own format.
    "mistral_large_3": Layout(
        "deepseek2",
        {
            **KEYS,
            "expert_gating_func": always(1),
            "attention.temperature_scale": scaled("yarn", "llama_4_scaling_beta"),
            "attention.temperature_length": scaled("yarn", "original_max_position_embeddings"),
        },
        LAYER,
        MODEL,
        pre="tekken",
    ),
    "minicpm3": Layout(
        "minicpm3",
        {
            **SIZES,
            **RMS,
            **VOCABULARY,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.key_length": "qk_head_dim",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        {**LAYER, "self_attn.kv_b_proj.weight": "attn_kv_b.weight"},
        MODEL,
        pieces=True,
        extra=longrope_factors,
    ),
    "youtu": Layout(
        "deepseek2",
        {
            **{key: value for key, value in KEYS.items() if not key.startswith("expert_")},
            "leading_dense_block_count": "num_hidden_layers",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": always(0),
            "expert_weights_scale": setting("routed_scaling_factor"),
        },
        LAYER,
        MODEL,
        pre="youtu",
    ),
}
