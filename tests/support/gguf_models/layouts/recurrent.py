"""Architectures with convolutions or state spaces in place of attention."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, EXPERTS, SIZES, VOCABULARY
from tests.support.gguf_models.layouts.layout import Layout, Place, Value, always
from tests.support.gguf_models.layouts.rotation import ROTATION


def _head_counts(config: Any) -> list[int]:
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def _adjusted_width(config: Any) -> int:
    if not config.block_auto_adjust_ff_dim:
        return int(config.intermediate_size)
    width = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
    return -(-width // config.block_multiple_of) * config.block_multiple_of


LFM2: dict[str, Value] = {
    **SIZES,
    **ROTATION,
    **VOCABULARY,
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.head_count_kv": _head_counts,
    "shortconv.l_cache": "conv_L_cache",
}
LFM2_LAYER: dict[str, Place] = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.conv": ("shortconv.conv", changes.squeezed),
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
LFM2_MODEL: dict[str, Place] = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "lfm2": Layout("lfm2", {**LFM2, "feed_forward_length": _adjusted_width}, LFM2_LAYER, LFM2_MODEL, pre="lfm2"),
    "lfm2_moe": Layout(
        "lfm2moe",
        {
            **LFM2,
            **EXPERTS,
            **EXPERT_WIDTH,
            "leading_dense_block_count": "num_dense_layers",
            "expert_gating_func": always(2),
        },
        {
            **LFM2_LAYER,
            "feed_forward.gate": "ffn_gate_inp",
            "feed_forward.experts.gate_up_proj": ("", changes.gate_and_up),
            "feed_forward.experts.down_proj": "ffn_down_exps.weight",
            "feed_forward.expert_bias": "exp_probs_b.bias",
        },
        LFM2_MODEL,
        pre="lfm2",
    ),
    "mamba": Layout(
        "mamba",
        {
            "context_length": always(1 << 20),
            "embedding_length": "hidden_size",
            "feed_forward_length": always(0),
            "attention.head_count": always(0),
            "block_count": "num_hidden_layers",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.inner_size": "intermediate_size",
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "time_step_rank",
            "ssm.dt_b_c_rms": always(False),
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        },
        {
            "norm": "attn_norm",
            "mixer.A_log": ("ssm_a", changes.minus_exponential),
            "mixer.D": "ssm_d",
            "mixer.conv1d": ("ssm_conv1d", changes.squeezed),
            "mixer.in_proj": "ssm_in",
            "mixer.x_proj": "ssm_x",
            "mixer.dt_proj": "ssm_dt",
            "mixer.out_proj": "ssm_out",
        },
        {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"},
        "backbone.layers",
        pre="gpt-2",
    ),
}
