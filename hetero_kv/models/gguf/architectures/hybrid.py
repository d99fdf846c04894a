"""Models with layers other than attention: LFM2's short convolutions, Mamba.

Sources: `conversion/lfm2.py` and `mamba.py` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import MODEL, SIGMOID, SIZES, put_experts
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader, ParameterPlace
from hetero_kv.models.gguf.architectures.inverse_transforms import CONVOLUTION, LOGARITHM
from hetero_kv.models.gguf.architectures.rope import put_rope

_RMS = "attention.layer_norm_rms_epsilon"


def _lfm2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    groups = metadata.get("attention.head_count_kv", ())
    layers = settings["num_hidden_layers"]
    per_layer = tuple(groups) if isinstance(groups, tuple | list) else (groups,) * layers
    attending = {count for count in per_layer if count}
    if len(attending) != 1:
        raise metadata.unsupported("attention.head_count_kv", "differs between attention layers")
    settings.put("num_key_value_heads", attending.pop(), "attention.head_count_kv")
    kinds = ["full_attention" if count else "conv" for count in per_layer]
    settings.put("layer_types", kinds, "attention.head_count_kv")
    settings.copy("conv_L_cache", "shortconv.l_cache")
    settings.put("conv_bias", metadata.has_tensor("shortconv.conv.bias"))
    settings.put("block_auto_adjust_ff_dim", False)
    metadata.expect("attention.sliding_window", 0, "is a window, which the model does not have")
    put_rope(metadata, settings)


def _lfm2_moe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _lfm2(metadata, settings)
    put_experts(metadata, settings, "num_experts")
    settings.put("num_dense_layers", metadata.scalar("leading_dense_block_count", 0), "leading_dense_block_count")
    metadata.expect("expert_gating_func", SIGMOID, "is not the model's choice of experts, sigmoid")
    settings.put("use_expert_bias", metadata.has_tensor("exp_probs_b.bias"))
    settings.put("norm_topk_prob", True)
    settings.put("routed_scaling_factor", 1.0)


def _mamba(metadata: MetadataReader, settings: ConfigSettings) -> None:
    if metadata.scalar("ssm.dt_b_c_rms", False):
        settings.values["model_type"] = "falcon_mamba"
    settings.copy("conv_kernel", "ssm.conv_kernel")
    settings.copy("state_size", "ssm.state_size")
    settings.copy("time_step_rank", "ssm.time_step_rank")
    inner = metadata.require("ssm.inner_size", "intermediate_size")
    if inner % settings["hidden_size"]:
        raise metadata.unsupported("ssm.inner_size", "is not a multiple of the hidden size")
    settings.put("expand", inner // settings["hidden_size"], "ssm.inner_size")
    settings.put("use_conv_bias", metadata.has_tensor("ssm_conv1d.bias"))
    settings.put("use_bias", metadata.has_tensor("ssm_in.bias"))


LFM2 = Architecture(
    "lfm2",
    ("lfm2",),
    {**SIZES, _RMS: "norm_eps"},
    {"token_embd": "embed_tokens", "token_embd_norm": "embedding_norm", "output": MODEL["output"]},
    {
        "attn_norm": "operator_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.conv.weight": ParameterPlace("conv.conv.weight", CONVOLUTION),
        "shortconv.conv.bias": "conv.conv.bias",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    _lfm2,
)
LFM2_MOE = Architecture(
    "lfm2moe",
    ("lfm2_moe",),
    LFM2.keys,
    LFM2.model,
    {
        **LFM2.layer,
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
    _lfm2_moe,
)
MAMBA = Architecture(
    "mamba",
    ("mamba", "falcon_mamba"),
    {"block_count": "num_hidden_layers", "embedding_length": "hidden_size", _RMS: "layer_norm_epsilon"},
    {"token_embd": "embeddings", "output_norm": "norm_f", "output": "/lm_head"},
    {
        "attn_norm": "norm",
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d.weight": ParameterPlace("mixer.conv1d.weight", CONVOLUTION),
        "ssm_conv1d.bias": "mixer.conv1d.bias",
        "ssm_x": "mixer.x_proj",
        "ssm_dt": "mixer.dt_proj",
        "ssm_a": ParameterPlace("mixer.A_log", LOGARITHM),
        "ssm_d": "mixer.D",
        "ssm_out": "mixer.out_proj",
    },
    _mamba,
    without_effect={
        "context_length": "the model has no limit; llama.cpp writes a constant",
        "feed_forward_length": "the model has no MLP",
        "attention.head_count": "the model has no heads",
    },
)

TABLES = (LFM2, LFM2_MOE, MAMBA)
