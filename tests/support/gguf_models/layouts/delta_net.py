"""Gated delta nets of Qwen3-Next."""

from __future__ import annotations

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, EXPERTS, USUAL
from tests.support.gguf_models.layouts.layout import Layout, Place, Value, always
from tests.support.gguf_models.layouts.names import ATTENTION, MIXED, MODEL
from tests.support.gguf_models.layouts.rotation import ROTATED

DELTA: dict[str, Value] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda config: config.linear_value_head_dim * config.linear_num_value_heads,
    "attention.recurrent_layers": lambda config: [kind == "linear_attention" for kind in config.layer_types],
    "full_attention_interval": always(4),
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

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "qwen3_next": Layout(
        "qwen3next",
        {
            **USUAL,
            **ROTATED,
            **EXPERTS,
            **EXPERT_WIDTH,
            **DELTA,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
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
        {**MODEL, "model.norm": ("output_norm", changes.plus_one)},
    ),
}
