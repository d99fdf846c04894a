"""Kimi delta attention and latent attention of Kimi Linear and Ling 3."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.deepseek import LAYER
from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, EXPERTS, RMS, SIZES, VOCABULARY
from tests.support.gguf_models.layouts.layout import Layout, Place, Value, always, setting
from tests.support.gguf_models.layouts.names import MODEL
from tests.support.gguf_models.layouts.rotation import ROTATION


def convolutions(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Those of queries, keys and values, [1, channels, 1, width] each."""
    parts = np.split(tensor, 3)
    return {f"ssm_conv1d_{name}.weight": part[None] for name, part in zip("qkv", parts, strict=True)}


def decay(tensor: np.ndarray, config: Any) -> np.ndarray:
    """The logarithms of Ling's decays, [heads] -> decays [heads, 1]."""
    return np.exp(tensor)[:, None]


LINEAR: dict[str, Place] = {
    **LAYER,
    "self_attn.conv1d.weight": ("", convolutions),
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
}


def ling_gate(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """One a head in layers with attention, one a number in linear ones."""
    name = "attn_gate" if len(tensor) == config.num_attention_heads else "ssm_g_a"
    return {f"{name}.weight": tensor}


KEYS: dict[str, Value] = {
    **SIZES,
    **RMS,
    **VOCABULARY,
    **EXPERTS,
    **EXPERT_WIDTH,
    "expert_used_count": "num_experts_per_token",
    "attention.head_count_kv": lambda config: [int(kind == "full_attention") for kind in config.layer_types],
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": lambda config: config.kv_lora_rank + config.qk_rope_head_dim,
    "attention.value_length": "head_dim",
    "attention.key_length_mla": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "kda.head_dim": "linear_head_dim",
    "expert_shared_count": "n_shared_experts",
    "expert_group_used_count": setting("topk_group"),
    "expert_weights_scale": "routed_scaling_factor",
    "expert_gating_func": always(2),
    "leading_dense_block_count": lambda config: config.mlp_layer_types.count("dense"),
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "kimi_linear": Layout(
        "kimi-linear",
        KEYS,
        {
            **LINEAR,
            "self_attn.forget_gate.A_log": ("ssm_a", changes.minus_exponential),
            "self_attn.forget_gate.f_a_proj": "ssm_f_a",
            "self_attn.forget_gate.f_b_proj": "ssm_f_b",
            "self_attn.g_a_proj": "ssm_g_a",
            "self_attn.g_b_proj": "ssm_g_b",
        },
        MODEL,
        pre="kimi-k2",
    ),
    "bailing_hybrid": Layout(
        "bailingmoe3",
        {
            **KEYS,
            **ROTATION,
            "attention.value_length": "linear_head_dim",
            "expert_group_count": "num_expert_group",
            "expert_shared_feed_forward_length": lambda config: config.n_shared_experts * config.moe_intermediate_size,
            "expert_weights_norm": "moe_renormalize",
            "kda.safe_gate": "kda_safe_gate",
            "kda.gate_lower_bound": "kda_lower_bound",
            # No limits of gates.
            "swiglu_clamp_exp": lambda config: [0.0] * config.num_hidden_layers,
            "swiglu_clamp_shexp": lambda config: [0.0] * config.num_hidden_layers,
        },
        {
            **LINEAR,
            "self_attn.forget_gate.A_log": ("ssm_a", decay),
            "self_attn.forget_gate.f_proj": "ssm_f_a",
            "self_attn.g_proj.weight": ("", ling_gate),
        },
        MODEL,
        pre="bailingmoe2",
    ),
}
