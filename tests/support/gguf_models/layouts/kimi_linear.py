"""Kimi delta attention and latent attention of Kimi Linear."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.deepseek import LAYER
from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, EXPERTS, RMS, SIZES, VOCABULARY
from tests.support.gguf_models.layouts.layout import Layout, always, setting
from tests.support.gguf_models.layouts.names import MODEL


def convolutions(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Those of queries, keys and values, [1, channels, 1, width] each."""
    parts = np.split(tensor, 3)
    return {f"ssm_conv1d_{name}.weight": part[None] for name, part in zip("qkv", parts, strict=True)}


#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "kimi_linear": Layout(
        "kimi-linear",
        {
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
        },
        {
            **LAYER,
            "self_attn.conv1d.weight": ("", convolutions),
            "self_attn.forget_gate.A_log": ("ssm_a", changes.minus_exponential),
            "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
            "self_attn.forget_gate.f_a_proj": "ssm_f_a",
            "self_attn.forget_gate.f_b_proj": "ssm_f_b",
            "self_attn.b_proj": "ssm_beta",
            "self_attn.g_a_proj": "ssm_g_a",
            "self_attn.g_b_proj": "ssm_g_b",
            "self_attn.o_norm": "ssm_norm",
        },
        MODEL,
        pre="kimi-k2",
    ),
}
