"""Settings that variants share."""

from __future__ import annotations

from typing import Any

WINDOW = 16
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DIM = {"head_dim": 32}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
GEMMA = {**DIM, **TIED, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}


def rotation(kind: str = "default", theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


# Trained on fewer tokens than the tests have, so that whatever depends on that acts.
YARN = {"factor": 16.0, "original_max_position_embeddings": 32}
LONG = {"long_factor": [1 + 0.3 * n for n in range(8)], "short_factor": [1 + 0.1 * n for n in range(8)]}

LATENT = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
GRANITE_SWA = {
    "num_hidden_layers": 4,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "layer_rope_theta": [0, 1e4, 1e4, 1e4],
}
LAGUNA = {
    **DIM,
    **EXPERTS,
    "num_hidden_layers": 5,
    "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
    "shared_expert_intermediate_size": 64,
    "moe_routed_scaling_factor": 1.7,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "gating": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "factor": 16.0,
            "original_max_position_embeddings": 32,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
LLAMA4 = {
    **DIM,
    **LOCAL_EXPERTS,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
}
# Of fewer tokens than the tests have.
INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 24}
GROUPS = {**ROUTED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
DELTA = {
    **DIM,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
# Three value heads a key head, so that neither order of theirs is the other's inverse.
DELTA35 = {
    **DELTA,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_value_heads": 6,
    "full_attention_interval": 2,
    **rotation(theta=1e5, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True),
}
GEMMA3N = {
    **DIM,
    **TIED,
    "num_hidden_layers": 5,
    "sliding_window": WINDOW,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"],
    "final_logit_softcapping": 9.0,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 32,
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.0, 0.0],
    "vocab_size_per_layer_input": 300,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    },
}
GEMMA4 = {
    **DIM,
    **TIED,
    "global_head_dim": 64,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 9.0,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    },
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
NEMOTRON = {
    **DIM,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 4,
}
V2 = {"norm_topk_prob": False}
ROUTED_YARN = rotation("yarn", 1e4, **YARN, beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707)
MISTRAL4 = {
    **LATENT,
    **GROUPS,
    **rotation(
        "yarn", 1e4, factor=32.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
    ),
}  # fmt: skip
