"""Mixtures of experts whose layers with a window rotate otherwise, and Hunyuan 3."""

from __future__ import annotations

from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, EXPERTS, USUAL, VOCABULARY, window_pattern
from tests.support.gguf_models.layouts.layout import Layout, always
from tests.support.gguf_models.layouts.names import (
    ATTENTION,
    GATED,
    HEAD_NORMS,
    MIXED,
    MODEL,
    NORMS,
    SHARED,
    USUAL_LAYER,
)
from tests.support.gguf_models.layouts.rotation import (
    ROTATED,
    rotation_of,
)

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "mellum": Layout(
        "mellum",
        {
            **USUAL,
            **EXPERTS,
            **EXPERT_WIDTH,
            "rope.freq_base_swa": lambda config: rotation_of(config, "sliding_attention")["rope_theta"],
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": window_pattern,
        },
        {**NORMS, **ATTENTION, **HEAD_NORMS, **MIXED},
        MODEL,
        pre="mellum2",
    ),
    "cohere2_moe": Layout(
        "cohere2moe",
        {
            **{key: value for key, value in USUAL.items() if "rms" not in key},
            **EXPERTS,
            **ROTATED,
            **VOCABULARY,
            "feed_forward_length": "prefix_dense_intermediate_size",
            "expert_feed_forward_length": "intermediate_size",
            "expert_gating_func": lambda config: {"softmax": 1, "sigmoid": 2}[config.expert_selection_fn],
            "expert_shared_count": "num_shared_experts",
            "expert_shared_feed_forward_length": lambda config: config.num_shared_experts * config.intermediate_size,
            "expert_weights_norm": "norm_topk_prob",
            "leading_dense_block_count": lambda config: config.mlp_layer_types.count("dense"),
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": window_pattern,
            "logit_scale": "logit_scale",
            "rope.scaling.type": always("none"),
        },
        {"input_layernorm": "attn_norm", **ATTENTION, **GATED, **MIXED, **SHARED},
        MODEL,
        pre="cohere2moe",
    ),
    "mimo_v2_flash": Layout(
        "mimo2",
        {
            **{key: value for key, value in USUAL.items() if not key.startswith("rope.scaling")},
            **ROTATED,
            **EXPERT_WIDTH,
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_gating_func": always(2),
            "attention.head_count_kv": lambda config: [
                config.num_key_value_heads * (2 if kind == "sliding_attention" else 1) for kind in config.layer_types
            ],
            "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale",
            "attention.sliding_window": lambda config: config.sliding_window - 1,
            "attention.sliding_window_pattern": lambda config: [
                int(kind == "sliding_attention") for kind in config.layer_types
            ],
            "rope.freq_base_swa": lambda config: rotation_of(config, "sliding_attention")["rope_theta"],
        },
        {
            **USUAL_LAYER,
            **MIXED,
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        },
        MODEL,
    ),
    "laguna": Layout(
        "laguna",
        {
            **USUAL,
            **EXPERTS,
            **EXPERT_WIDTH,
            **VOCABULARY,
            **ROTATED,
            "attention.head_count": "num_attention_heads_per_layer",
            "attention.sliding_window": "sliding_window",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_norm": always(True),
            "expert_weights_scale": "moe_routed_scaling_factor",
            "expert_gating_func": always(2),
            "leading_dense_block_count": lambda config: config.mlp_layer_types.count("dense"),
            "rope.freq_base_swa": lambda config: rotation_of(config, "sliding_attention")["rope_theta"],
            "rope.dimension_count_swa": lambda config: int(
                config.head_dim * rotation_of(config, "sliding_attention")["partial_rotary_factor"]
            ),
        },
        {**USUAL_LAYER, **HEAD_NORMS, **MIXED, **SHARED, "self_attn.g_proj": "attn_gate"},
        MODEL,
        pre="laguna",
    ),
    "hy_v3": Layout(
        "hy_v3",
        {
            **USUAL,
            **EXPERTS,
            **EXPERT_WIDTH,
            "expert_shared_feed_forward_length": lambda config: (
                config.moe_intermediate_size * config.num_shared_experts
            ),
            "expert_weights_norm": always(True),
            "expert_weights_scale": "router_scaling_factor",
            "expert_gating_func": always(2),
        },
        {**USUAL_LAYER, **HEAD_NORMS, **MIXED, **SHARED, "mlp.e_score_correction_bias": "exp_probs_b"},
        MODEL,
        pre="hunyuan-dense",
    ),
}
