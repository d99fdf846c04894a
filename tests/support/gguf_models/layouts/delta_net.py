"""Gated delta nets of Qwen3-Next and Qwen 3.5."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, EXPERTS, USUAL
from tests.support.gguf_models.layouts.layout import Layout, Place, Value, setting
from tests.support.gguf_models.layouts.names import ATTENTION, GATED, MIXED, MODEL
from tests.support.gguf_models.layouts.rotation import ROTATED

DELTA: dict[str, Value] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda config: config.linear_value_head_dim * config.linear_num_value_heads,
    "attention.recurrent_layers": lambda config: [kind == "linear_attention" for kind in config.layer_types],
    "full_attention_interval": setting("full_attention_interval", 4),
}
SHARED_EXPERT: dict[str, Place] = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
NORMED_ATTENTION: dict[str, Place] = {
    **ATTENTION,
    "input_layernorm": ("attn_norm", changes.plus_one),
    "post_attention_layernorm": ("post_attention_norm", changes.plus_one),
    "self_attn.q_norm": ("attn_q_norm", changes.plus_one),
    "self_attn.k_norm": ("attn_k_norm", changes.plus_one),
}
SHARED_WIDTH: dict[str, Value] = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
NORMED_MODEL: dict[str, Place] = {**MODEL, "model.norm": ("output_norm", changes.plus_one)}


def sections(config: Any) -> list[int]:
    """How many pairs turn by each axis of positions; the fourth has none."""
    return [*config.rope_parameters.get("mrope_section", [11, 11, 10]), 0]


QWEN35: dict[str, Value] = {**USUAL, **ROTATED, **DELTA, "rope.dimension_sections": sections}
QWEN35_LAYER: dict[str, Place] = {
    **NORMED_ATTENTION,
    "linear_attn.in_proj_qkv": ("attn_qkv", changes.by_value_head_behind),
    "linear_attn.in_proj_z": ("attn_gate", changes.by_value_head),
    "linear_attn.in_proj_a": ("ssm_alpha", changes.by_value_head),
    "linear_attn.in_proj_b": ("ssm_beta", changes.by_value_head),
    "linear_attn.conv1d": ("ssm_conv1d", changes.squeezed_by_value_head),
    "linear_attn.A_log": ("ssm_a", changes.minus_exponential_by_value_head),
    "linear_attn.dt_bias": ("ssm_dt.bias", changes.by_value_head),
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": ("ssm_out", changes.columns_by_value_head),
}


#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "qwen3_next": Layout(
        "qwen3next",
        {**USUAL, **ROTATED, **EXPERTS, **EXPERT_WIDTH, **SHARED_WIDTH, **DELTA},
        {
            **NORMED_ATTENTION,
            **MIXED,
            **SHARED_EXPERT,
            "linear_attn.in_proj_qkvz.weight": ("", changes.split_by_key_head),
            "linear_attn.in_proj_ba": "ssm_ba",
            "linear_attn.conv1d": ("ssm_conv1d", changes.squeezed),
            "linear_attn.A_log": ("ssm_a", changes.minus_exponential),
            "linear_attn.dt_bias": "ssm_dt.bias",
            "linear_attn.norm": "ssm_norm",
            "linear_attn.out_proj": "ssm_out",
        },
        NORMED_MODEL,
    ),
    "qwen3_5_text": Layout("qwen35", QWEN35, {**QWEN35_LAYER, **GATED}, NORMED_MODEL, pre="qwen35"),
    "qwen3_5_moe_text": Layout(
        "qwen35moe",
        {**QWEN35, **EXPERTS, **EXPERT_WIDTH, **SHARED_WIDTH, "feed_forward_length": setting("intermediate_size")},
        {**QWEN35_LAYER, **MIXED, **SHARED_EXPERT},
        NORMED_MODEL,
        pre="qwen35",
    ),
}
