"""Variants with recurrent layers or short convolutions."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models.settings import (
    DELTA,
    DELTA35,
    EXPERTS,
    LATENT,
    LOCAL_EXPERTS,
    MAMBA2,
    NEMOTRON,
    TIED,
    YARN,
    rotation,
)

#: As `variants.VARIANTS`.
RECURRENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
    ),
    "mamba": ("mamba", {"state_size": 8, "use_mambapy": False, **TIED}),
    "mamba: FalconMamba": ("falcon_mamba", {"state_size": 8, "use_mambapy": False, **TIED}),
    "mamba2": (
        "mamba2",
        {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 4, "conv_kernel": 4, **TIED},
    ),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 5,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "jamba: no experts": (
        "jamba",
        {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "nemotron_h": ("nemotron_h", {**NEMOTRON, "layer_types": ["linear_attention", "mlp", "full_attention", "mlp"]}),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            **NEMOTRON,
            "layout": "nemotron_h_moe",
            "layer_types": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "moe_latent_size": 32,
            "routed_scaling_factor": 1.7,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            **{name: value for name, value in MAMBA2.items() if name != "layer_types"},
            "head_dim": 32,
            "mamba_d_ssm": 128,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.8,
            "mlp_multipliers": [0.9, 0.7],
            "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
        },
    ),
    "falcon-h1: norm": (
        "falcon_h1",
        {
            **{name: value for name, value in MAMBA2.items() if name != "layer_types"},
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mlp_multipliers": [1.0, 1.0],
            "ssm_multipliers": [1.0] * 5,
        },
    ),
    "granitehybrid: Bamba": (
        "bamba",
        {
            **{name: value for name, value in MAMBA2.items() if name != "layer_types"},
            "attn_layer_indices": [1],
            **rotation(partial_rotary_factor=0.5),
        },
    ),
    "lfm2moe": (
        "lfm2_moe",
        {
            **EXPERTS,
            **TIED,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "conv_L_cache": 3,
        },
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            **{name: value for name, value in LATENT.items() if name != "q_lora_rank"},
            **LOCAL_EXPERTS,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.7,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "bailingmoe3": (
        "bailing_hybrid",
        {
            **{name: value for name, value in LATENT.items() if name != "q_lora_rank"},
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.7,
            "head_dim": 16,
            "kda_lower_bound": -4.0,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **rotation(theta=1e5),
        },
    ),
    "qwen3next": (
        "qwen3_next",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64, **rotation(partial_rotary_factor=0.25)},
    ),
    "qwen3next: older converter": (
        "qwen3_next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64, "is_of_older_converter": True}
    ),
    "qwen35": ("qwen3_5_text", DELTA35),
    "qwen35: tied, YaRN, biases, values of another size": (
        "qwen3_5_text",
        {
            **DELTA,
            **TIED,
            "linear_value_head_dim": 16,
            "linear_num_value_heads": 2,
            "attention_bias": True,
            **rotation("yarn", partial_rotary_factor=0.5, **YARN),
        },
    ),
    "qwen35moe": ("qwen3_5_moe_text", {**DELTA35, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen4exp": (
        "qwen4_exp_text",
        {
            **DELTA35,
            **EXPERTS,
            "hidden_size": 128,
            "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
            "shared_expert_intermediate_size": 64,
            "output_gate_type": "sigmoid",
            "hc_count": 3,
            "hc_lowrank": 32,
            "ple_layer_ids": [2],
            "ple_conv_kernel_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 300,
            "seed": 7,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 12,
            "indexer_compress_ratio": 4,
        },
    ),
    "granitehybrid": (
        "granitemoehybrid",
        {
            **MAMBA2,
            **LOCAL_EXPERTS,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    "granitehybrid: dense, rotated": (
        "granitemoehybrid",
        {
            **MAMBA2,
            **TIED,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "attention_multiplier": 0.2,
            "position_embedding_type": "rope",
        },
    ),
}  # fmt: skip
