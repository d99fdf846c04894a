"""Variants with a mixture of experts."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models.settings import (
    DIM,
    EXPERTS,
    GEMMA4,
    GRANITE_SWA,
    GROUPS,
    INDEXER,
    LAGUNA,
    LATENT,
    LLAMA4,
    LOCAL_EXPERTS,
    LONG,
    MISTRAL4,
    ROUTED,
    ROUTED_YARN,
    TIED,
    V2,
    WINDOW,
    YARN,
    rotation,
)

#: As `variants.VARIANTS`.
EXPERT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama: Mixtral": ("mixtral", {**LOCAL_EXPERTS, "sliding_window": None}),
    "granitemoe": (
        "granitemoe",
        {
            **LOCAL_EXPERTS,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    "qwen2moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen3moe": ("qwen3_moe", {**DIM, **EXPERTS, "norm_topk_prob": True}),
    "gpt-oss": (
        "gpt_oss",
        {
            **DIM,
            **LOCAL_EXPERTS,
            "sliding_window": WINDOW,
            **rotation("yarn", 1.5e4, **YARN, beta_fast=32.0, beta_slow=1.0, truncate=False),
        },
    ),
    "minimax-m2": ("minimax_m2", {**DIM, **LOCAL_EXPERTS, "rotary_dim": 16}),
    "afmoe": (
        "afmoe",
        {
            **DIM,
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "route_scale": 1.7,
            "sliding_window": WINDOW,
            "mup_enabled": True,
        },
    ),
    "mellum": (
        "mellum",
        {
            **DIM,
            **EXPERTS,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e5, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "cohere2moe": (
        "cohere2_moe",
        {
            **DIM,
            **TIED,
            "num_hidden_layers": 5,
            "intermediate_size": 32,
            "prefix_dense_intermediate_size": 96,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "logit_scale": 0.3,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 4],
        },
    ),
    "hy_v3": ("hy_v3", {**DIM, **EXPERTS, "num_shared_experts": 2, "router_scaling_factor": 1.7}),
    "mimo2": (
        "mimo_v2_flash",
        {
            **{name: value for name, value in ROUTED.items() if name not in ("first_k_dense_replace",)},
            "head_dim": 48,
            "v_head_dim": 32,
            "num_hidden_layers": 4,
            "routed_scaling_factor": 1.0,
            "attention_value_scale": 0.7,
            "sliding_window": WINDOW + 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.334},
            },
        },
    ),
    "llama4": ("llama4_text", LLAMA4),
    "llama4: rotation of Scout": (
        "llama4_text",
        {
            **LLAMA4,
            **rotation(
                "llama3", 50.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=1.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "phimoe": (
        "phimoe",
        {
            **LOCAL_EXPERTS,
            "attention_bias": True,
            "lm_head_bias": True,
            "max_position_embeddings": 131_072,
            "sliding_window": None,
            **rotation(
                "longrope", 1e4, **LONG, original_max_position_embeddings=4096,
                short_mscale=1.243163121016122, long_mscale=1.243163121016122,
            ),
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "d_model": 64,
            "n_layers": 3,
            "n_heads": 4,
            "max_seq_len": 512,
            "tie_word_embeddings": False,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 5e5},
            "ffn_config": {
                "hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2,
                "moe_normalize_expert_weights": 1.0,
            },
            **rotation(theta=5e5),
        },
    ),
    "granitemoe: shared expert": (
        "granitemoeshared",
        {
            **LOCAL_EXPERTS,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    "granite_swa: experts": (
        "granitemoe_swa", {**LOCAL_EXPERTS, **GRANITE_SWA, "shared_intermediate_size": 64}
    ),
    "minicpm3": (
        "minicpm3",
        {
            **{name: value for name, value in LATENT.items() if name != "v_head_dim"},
            **TIED,
            "v_head_dim": 16,
            **rotation(
                "longrope", 1e4, long_factor=[1 + 0.3 * n for n in range(4)],
                short_factor=[1 + 0.1 * n for n in range(4)], original_max_position_embeddings=512,
            ),
        },
    ),
    "laguna": ("laguna", LAGUNA),
    "laguna: gates of numbers": ("laguna", {**LAGUNA, "gating": "per-element"}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "intermediate_size": 64,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": [2] * 3, "num_shared_expert": 1}
    ),
    "dots1": ("dots1", {**DIM, **ROUTED, "sliding_window": None}),
    "glm4moe": (
        "glm4_moe", {**DIM, **ROUTED, "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True}
    ),
    "exaone-moe": (
        "exaone_moe",
        {
            **DIM,
            **{name: value for name, value in ROUTED.items() if not name.startswith("n_")},
            **EXPERTS,
            "n_group": 1,
            "num_shared_experts": 1,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 4,
        },
    ),
    "deepseek2": ("deepseek_v3", {**LATENT, **GROUPS, **ROUTED_YARN}),
    "deepseek2: V2 Lite": ("deepseek_v2", {**LATENT, **ROUTED, **V2, "q_lora_rank": None}),
    "deepseek2: V2 with groups": ("deepseek_v2", {**LATENT, **GROUPS, **V2, "topk_method": "group_limited_greedy"}),
    "deepseek2: GLM 4.7 Flash": ("glm4_moe_lite", {**LATENT, **ROUTED}),
    "deepseek2: Youtu": ("youtu", {**LATENT, **TIED}),
    "deepseek2: older converter": ("deepseek_v3", {**LATENT, **ROUTED, "is_of_older_converter": True}),
    "deepseek32": ("deepseek_v32", {**LATENT, **GROUPS, **INDEXER, **ROUTED_YARN}),
    "glm-dsa": (
        "glm_moe_dsa",
        {**LATENT, **GROUPS, **INDEXER, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    ),
    "deepseek4": (
        "deepseek_v4",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "partial_rotary_factor": 0.25,
            "q_lora_rank": 40,
            "o_groups": 2,
            "o_lora_rank": 32,
            "sliding_window": WINDOW,
            "layer_types": [
                "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.7,
            "swiglu_limit": 0.75,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": 6,
            "compress_rope_theta": 5e3,
            **rotation("yarn", 1e4, **YARN, beta_fast=32.0, beta_slow=1.0),
        },
    ),
    "hy_v4": (
        "hy_v4",
        {
            **LATENT,
            **{name: value for name, value in ROUTED.items() if name != "first_k_dense_replace"},
            **INDEXER,
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full"],
            "swiglu_limit": 0.75,
        },
    ),
    "dots3note": (
        "dots3_note_text",
        {
            **LATENT,
            **ROUTED,
            **INDEXER,
            "num_hidden_layers": 4,
            "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention"],
            "sliding_window": WINDOW,
            "shared_experts_intermediate_size": 32,
            "rope_theta": 1e5,
            "swa_rope_theta": 5e3,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 40,
            "swa_kv_lora_rank": 48,
            "swa_head_dim": 32,
            "swa_qk_nope_head_dim": 24,
            "swa_v_head_dim": 16,
        },
    ),
    "minimax-m3": (
        "minimax_m3_vl_text",
        {
            **DIM,
            **LOCAL_EXPERTS,
            "num_hidden_layers": 3,
            "intermediate_size": 32,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "routed_scaling_factor": 1.7,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 24,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            **rotation(theta=5e6, partial_rotary_factor=0.5),
        },
    ),
    "mistral4": ("mistral4", {**MISTRAL4, "first_k_dense_replace": 0}),
    "deepseek2: Mistral Large 3": ("mistral4", {"layout": "mistral_large_3", **MISTRAL4, "num_hidden_layers": 3}),
    "gemma4: experts": (
        "gemma4_text",
        {
            **GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32
        },
    ),
    "qwen3vlmoe": ("qwen3_moe", {"layout": "qwen3vlmoe", **DIM, **EXPERTS, "norm_topk_prob": True}),
}  # fmt: skip
