"""Mixtures of experts."""

from __future__ import annotations

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import (
    EXPERT_WIDTH,
    EXPERTS,
    ROUTED,
    USUAL,
    VOCABULARY,
    window_pattern,
)
from tests.support.gguf_models.layouts.layout import Layout, always
from tests.support.gguf_models.layouts.names import (
    ATTENTION,
    HEAD_NORMS,
    HUNYUAN_NORMS,
    MIXED,
    MODEL,
    NORMS,
    SHARED,
    USUAL_LAYER,
)
from tests.support.gguf_models.layouts.rotation import (
    ROTATED,
)

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "gpt_oss": Layout(
        "gpt-oss",
        {
            **USUAL,
            **EXPERTS,
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        {
            **ATTENTION,
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_up_proj": ("", changes.alternating_gate_and_up),
            "mlp.experts.gate_up_proj_bias": ("", changes.alternating_gate_and_up),
            "mlp.experts.down_proj": ("ffn_down_exps.weight", changes.columns_first),
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
        MODEL,
        pre="gpt-4o",
    ),
    "minimax_m2": Layout(
        "minimax-m2",
        {
            **USUAL,
            **EXPERTS,
            **ROTATED,
            "expert_feed_forward_length": "intermediate_size",
            "expert_gating_func": always(2),
        },
        {
            **NORMS,
            **ATTENTION,
            **HEAD_NORMS,
            **MIXED,
            "mlp.e_score_correction_bias": "exp_probs_b.bias",
        },
        MODEL,
        pre="minimax-m2",
    ),
    "exaone_moe": Layout(
        "exaone-moe",
        {
            **USUAL,
            **ROUTED,
            **VOCABULARY,
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
            "expert_shared_feed_forward_length": lambda config: (
                config.moe_intermediate_size * config.num_shared_experts
            ),
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": window_pattern,
            "expert_gating_func": always(2),
            "nextn_predict_layers": always(0),
            "rope.scaling.type": always("none"),
        },
        {**USUAL_LAYER, **HEAD_NORMS, **MIXED, **SHARED},
        MODEL,
        pre="exaone-moe",
    ),
    "afmoe": Layout(
        "afmoe",
        {
            **USUAL,
            **EXPERTS,
            **EXPERT_WIDTH,
            **ROTATED,
            **VOCABULARY,
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": "num_dense_layers",
            "expert_weights_norm": always(True),
            "expert_weights_scale": "route_scale",
            "attention.sliding_window": "sliding_window",
        },
        {
            **USUAL_LAYER,
            **HEAD_NORMS,
            **MIXED,
            **SHARED,
            "self_attn.gate_proj": "attn_gate",
            "post_attention_layernorm": "post_attention_norm",
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.router.gate": "ffn_gate_inp",
            "mlp.expert_bias": "exp_probs_b.bias",
        },
        MODEL,
        pre="afmoe",
    ),
    "olmoe": Layout("olmoe", {**USUAL, **EXPERTS}, {**NORMS, **ATTENTION, **HEAD_NORMS, **MIXED}, MODEL, pre="olmo"),
    "hunyuan_v1_moe": Layout(
        "hunyuan-moe",
        {
            **USUAL,
            "expert_count": "num_experts",
            "expert_used_count": lambda config: config.moe_topk[0],
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": always(1),
            "expert_shared_feed_forward_length": "intermediate_size",
        },
        {
            **NORMS,
            **ATTENTION,
            **HUNYUAN_NORMS,
            **MIXED,
            "mlp.gate.wg": "ffn_gate_inp",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
        MODEL,
        pre="hunyuan",
    ),
    "ernie4_5_moe": Layout(
        "ernie4_5-moe",
        {
            **USUAL,
            **EXPERT_WIDTH,
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_shared_feed_forward_length": lambda config: config.intermediate_size // config.num_key_value_heads,
        },
        {
            **USUAL_LAYER,
            **MIXED,
            **SHARED,
            "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
        },
        MODEL,
        pieces=True,
    ),
    "dots1": Layout(
        "dots1",
        {**USUAL, **ROUTED, "expert_gating_func": always(2)},
        {**USUAL_LAYER, **HEAD_NORMS, **MIXED, **SHARED},
        MODEL,
    ),
    "glm4_moe": Layout(
        "glm4moe",
        {**USUAL, **ROTATED, **ROUTED, "expert_gating_func": always(2)},
        {
            **USUAL_LAYER,
            **HEAD_NORMS,
            **MIXED,
            **SHARED,
            "post_attention_layernorm": "post_attention_norm",
        },
        MODEL,
        pre="glm4",
    ),
}
