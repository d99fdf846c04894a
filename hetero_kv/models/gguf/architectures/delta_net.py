"""Qwen3-Next and Qwen 3.5: layers with a gated delta net between attention layers.

Sources: `conversion/qwen.py`, `src/models/qwen3next.cpp` and `qwen35.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    GATED,
    MODEL,
    RMS_NORM,
    ROUTER,
    SIZES,
    put_experts,
    put_heads,
    put_layers_without_predictors,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import (
    CONVOLUTION,
    DELTA_GATE_ROWS,
    DELTA_QKV_ROWS,
    LOGARITHM,
    NORM_PLUS_ONE,
    VALUE_HEAD_COLUMNS,
    VALUE_HEADS,
    VALUE_HEADS_BEHIND,
    VALUE_HEADS_CONVOLUTION,
    VALUE_HEADS_LOGARITHM,
)
from hetero_kv.models.gguf.architectures.qwen import SHARED_EXPERT
from hetero_kv.models.gguf.architectures.rope import put_rope

RECURRENT, INTERVAL = "attention.recurrent_layers", "full_attention_interval"


def _qwen35(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_delta_net(metadata, settings, axes=True)


def put_delta_net(metadata: MetadataReader, settings: ConfigSettings, *, axes: bool) -> None:
    """Put which layers have a delta net, its sizes, and what layers with attention have."""
    blocks = settings["num_hidden_layers"]
    put_layers_without_predictors(metadata, settings)
    put_heads(metadata, settings)
    put_rope(metadata, settings, partial=True, axes=axes)
    interval = metadata.scalar(INTERVAL, 4)
    recurrent = metadata.get(RECURRENT, tuple((block + 1) % interval != 0 for block in range(blocks)))
    if len(recurrent) != blocks:
        raise metadata.unsupported(RECURRENT, f"has not one value for each of {blocks} blocks")
    kinds = ["linear_attention" if each else "full_attention" for each in recurrent[: settings["num_hidden_layers"]]]
    settings.put("layer_types", kinds, RECURRENT)
    settings.copy("linear_conv_kernel_dim", "ssm.conv_kernel")
    settings.copy("linear_key_head_dim", "ssm.state_size")
    settings.copy("linear_num_key_heads", "ssm.group_count")
    settings.copy("linear_num_value_heads", "ssm.time_step_rank")
    heads, groups = settings["linear_num_value_heads"], settings["linear_num_key_heads"]
    inner = metadata.scalar("ssm.inner_size", heads * settings["linear_key_head_dim"])
    for suffix, value, by, part in (
        ("ssm.time_step_rank", heads, "ssm.group_count", groups),
        ("ssm.inner_size", inner, "ssm.time_step_rank", heads),
    ):
        if value % part:
            raise metadata.unsupported(suffix, f"is no multiple of the {part} of {metadata.key(by)}")
    settings.put("linear_value_head_dim", inner // heads, "ssm.inner_size")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


def _qwen35_moe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _qwen35(metadata, settings)
    put_experts(metadata, settings, "num_experts")
    settings.copy("shared_expert_intermediate_size", "expert_shared_feed_forward_length")


def _qwen3_next(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_delta_net(metadata, settings, axes=False)
    put_experts(metadata, settings, "num_experts")
    settings.copy("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
    # Every layer has experts, and the weights of those chosen are normalized.
    settings.put("decoder_sparse_step", 1)
    settings.put("mlp_only_layers", [])
    settings.put("norm_topk_prob", True)


def _norm(path: str) -> ParameterPlace:
    return ParameterPlace(path, NORM_PLUS_ONE)


_KEYS = {**SIZES, **RMS_NORM}
_MODEL: Places = {**MODEL, "output_norm": _norm("norm")}
_ATTENTION: Places = {
    **{name: place for name, place in ATTENTION.items() if not name.endswith("norm")},
    "attn_norm": _norm("input_layernorm"),
    "attn_q_norm": _norm("self_attn.q_norm"),
    "attn_k_norm": _norm("self_attn.k_norm"),
    "post_attention_norm": _norm("post_attention_layernorm"),
}
LAYER: Places = {
    **_ATTENTION,
    "attn_qkv": ParameterPlace("linear_attn.in_proj_qkv", VALUE_HEADS_BEHIND),
    "attn_gate": ParameterPlace("linear_attn.in_proj_z", VALUE_HEADS),
    "ssm_alpha": ParameterPlace("linear_attn.in_proj_a", VALUE_HEADS),
    "ssm_beta": ParameterPlace("linear_attn.in_proj_b", VALUE_HEADS),
    "ssm_a": ParameterPlace("linear_attn.A_log", VALUE_HEADS_LOGARITHM),
    "ssm_dt.bias": ParameterPlace("linear_attn.dt_bias", VALUE_HEADS),
    "ssm_conv1d.weight": ParameterPlace("linear_attn.conv1d.weight", VALUE_HEADS_CONVOLUTION),
    "ssm_norm": "linear_attn.norm",
    "ssm_out": ParameterPlace("linear_attn.out_proj", VALUE_HEAD_COLUMNS),
}

_NEXT_LAYER: Places = {
    **_ATTENTION,
    **ROUTER,
    **SHARED_EXPERT,
    "attn_qkv": ParameterPlace("linear_attn.in_proj_qkvz", part=DELTA_QKV_ROWS),
    "attn_gate": ParameterPlace("linear_attn.in_proj_qkvz", part=DELTA_GATE_ROWS),
    # Older files have one matrix for both.
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_a": ParameterPlace("linear_attn.A_log", LOGARITHM),
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": ParameterPlace("linear_attn.conv1d.weight", CONVOLUTION),
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}

TABLES = (
    Architecture(
        "qwen3next",
        ("qwen3_next",),
        _KEYS,
        _MODEL,
        _NEXT_LAYER,
        _qwen3_next,
        optional=frozenset({"feed_forward_length"}),
        predicts=True,
    ),
    Architecture("qwen35", ("qwen3_5_text",), _KEYS, _MODEL, {**LAYER, **GATED}, _qwen35, predicts=True),
    Architecture(
        "qwen35moe",
        ("qwen3_5_moe_text",),
        _KEYS,
        _MODEL,
        {**LAYER, **ROUTER, **SHARED_EXPERT},
        _qwen35_moe,
        optional=frozenset({"feed_forward_length"}),
        predicts=True,
    ),
)
