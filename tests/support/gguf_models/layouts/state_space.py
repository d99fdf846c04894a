"""Mamba 2, FalconMamba, Falcon-H1, Jamba, Nemotron-H and Bamba."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models import changes
from tests.support.gguf_models.changes import multiplied
from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, HEAD, RMS, SIZES, VOCABULARY
from tests.support.gguf_models.layouts.layout import Layout, Place, Value, always
from tests.support.gguf_models.layouts.names import ATTENTION, GATED, MODEL, PERMUTED
from tests.support.gguf_models.layouts.recurrent import LAYOUTS as RECURRENT
from tests.support.gguf_models.layouts.rotation import BASE, ROTATED

MAMBA = RECURRENT["mamba"]


def _mamba2(module: str, groups: str) -> dict[str, Place]:
    return {
        f"{module}.in_proj": "ssm_in",
        f"{module}.conv1d": ("ssm_conv1d", changes.squeezed),
        f"{module}.A_log": ("ssm_a", changes.minus_exponential_column),
        f"{module}.D": ("ssm_d", changes.one_column),
        f"{module}.dt_bias": "ssm_dt.bias",
        f"{module}.norm": ("ssm_norm", changes.by_group(groups)),
        f"{module}.out_proj": "ssm_out",
    }


def _kv_heads(config: Any) -> list[int]:
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def _nemotron_widths(config: Any) -> list[int]:
    widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    return [widths.get(kind, 0) for kind in config.layer_types]


def _bamba_kv_heads(config: Any) -> list[int]:
    layers = range(config.num_hidden_layers)
    return [config.num_key_value_heads if layer in config.attn_layer_indices else 0 for layer in layers]


NEMOTRON_KEYS: dict[str, Value] = {
    **SIZES,
    **HEAD,
    **VOCABULARY,
    "context_length": always(1 << 20),
    "feed_forward_length": _nemotron_widths,
    "attention.head_count_kv": _kv_heads,
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "rope.dimension_count": lambda config: config.hidden_size // config.num_attention_heads,
    "rope.scaling.finetuned": always(False),
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.inner_size": lambda config: config.mamba_num_heads * config.mamba_head_dim,
    "ssm.time_step_rank": "mamba_num_heads",
}
NEMOTRON_LAYER: dict[str, Place] = {
    **_mamba2("mixer", "n_groups"),
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
NEMOTRON_MODEL: dict[str, Place] = {
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "lm_head": "output",
}
MAMBA_KEYS: dict[str, Value] = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "falcon_mamba": Layout(
        "mamba", {**MAMBA.keys, "ssm.dt_b_c_rms": always(True)}, MAMBA.layer, MAMBA.model, MAMBA.blocks, pre="gpt-2"
    ),
    "mamba2": Layout(
        "mamba2",
        {
            "context_length": always(1 << 20),
            "embedding_length": "hidden_size",
            "feed_forward_length": always(0),
            "attention.head_count": always(0),
            "block_count": "num_hidden_layers",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.inner_size": lambda config: config.expand * config.hidden_size,
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "num_heads",
            "ssm.group_count": "n_groups",
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        },
        {"norm": "attn_norm", **_mamba2("mixer", "n_groups")},
        MAMBA.model,
        MAMBA.blocks,
        pre="gpt-2",
    ),
    "jamba": Layout(
        "jamba",
        {
            **SIZES,
            **RMS,
            "attention.head_count_kv": _kv_heads,
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.inner_size": lambda config: config.mamba_expand * config.hidden_size,
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        {
            **ATTENTION,
            "input_layernorm": "attn_norm",
            "pre_ff_layernorm": "ffn_norm",
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
            "feed_forward.router": "ffn_gate_inp",
            "feed_forward.experts.gate_up_proj": ("", changes.gate_and_up),
            "feed_forward.experts.down_proj": "ffn_down_exps.weight",
            "mamba.in_proj": "ssm_in",
            "mamba.conv1d": ("ssm_conv1d", changes.squeezed),
            "mamba.x_proj": "ssm_x",
            "mamba.dt_proj": "ssm_dt",
            "mamba.dt_layernorm": "ssm_dt_norm",
            "mamba.b_layernorm": "ssm_b_norm",
            "mamba.c_layernorm": "ssm_c_norm",
            "mamba.A_log": ("ssm_a", changes.minus_exponential),
            "mamba.D": "ssm_d",
            "mamba.out_proj": "ssm_out",
        },
        {**MODEL, "model.final_layernorm": "output_norm"},
        pieces=True,
    ),
    "nemotron_h": Layout("nemotron_h", NEMOTRON_KEYS, NEMOTRON_LAYER, NEMOTRON_MODEL, pre="tekken"),
    "nemotron_h_moe": Layout(
        "nemotron_h_moe",
        {
            **NEMOTRON_KEYS,
            **EXPERT_WIDTH,
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "moe_latent_size": "moe_latent_size",
        },
        NEMOTRON_LAYER,
        NEMOTRON_MODEL,
        pre="tekken",
    ),
    "falcon_h1": Layout(
        "falcon-h1",
        {
            **SIZES,
            **RMS,
            **HEAD,
            **BASE,
            **VOCABULARY,
            **MAMBA_KEYS,
            "ssm.inner_size": "mamba_d_ssm",
        },
        {
            **_mamba2("mamba", "mamba_n_groups"),
            "input_layernorm": "attn_norm",
            "pre_ff_layernorm.weight": "ffn_norm",
            "self_attn.q_proj": ("attn_q", multiplied("attention_in_multiplier")),
            "self_attn.k_proj": ("attn_k", multiplied("attention_in_multiplier", "key_multiplier")),
            "self_attn.v_proj": ("attn_v", multiplied("attention_in_multiplier")),
            "self_attn.o_proj": ("attn_output", multiplied("attention_out_multiplier")),
            "mamba.in_proj": ("ssm_in", changes.multiplied_sections),
            "mamba.out_proj": ("ssm_out", multiplied("ssm_out_multiplier")),
            "feed_forward.gate_proj": ("ffn_gate", multiplied("mlp_multipliers", place=0)),
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": ("ffn_down", multiplied("mlp_multipliers", place=1)),
        },
        {
            "model.embed_tokens": ("token_embd", multiplied("embedding_multiplier")),
            "model.final_layernorm": "output_norm",
            "lm_head": ("output", multiplied("lm_head_multiplier")),
        },
        pre="falcon-h1",
    ),
    "bamba": Layout(
        "granitehybrid",
        {
            **SIZES,
            **RMS,
            **BASE,
            **ROTATED,
            **VOCABULARY,
            **MAMBA_KEYS,
            "attention.head_count_kv": _bamba_kv_heads,
            "ssm.inner_size": lambda config: config.mamba_expand * config.hidden_size,
            "rope.scaling.finetuned": always(True),
        },
        {
            **_mamba2("mamba", "mamba_n_groups"),
            **ATTENTION,
            **PERMUTED,
            **{name.replace("mlp", "feed_forward"): place for name, place in GATED.items()},
            "input_layernorm": "attn_norm",
            "pre_ff_layernorm": "ffn_norm",
        },
        {**MODEL, "model.final_layernorm": "output_norm"},
        pre="llama-bpe",
    ),
}
