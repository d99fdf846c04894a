"""Variants with a mixture of experts."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models.settings import (
    DIM,
    EXPERTS,
    GEMMA4,
    GROUPS,
    LATENT,
    LOCAL_EXPERTS,
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
    "gemma4: experts": (
        "gemma4_text",
        {
            **GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32
        },
    ),
    "qwen3vlmoe": ("qwen3_moe", {"layout": "qwen3vlmoe", **DIM, **EXPERTS, "norm_topk_prob": True}),
}  # fmt: skip
