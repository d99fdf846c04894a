"""Mixtures of experts: AFMoE, gpt-oss, MiniMax-M2, GLM 4.5, dots.llm1, EXAONE MoE, OLMoE, ERNIE 4.5, Hunyuan.

Sources: their files in `conversion/` and `src/models/` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    GATED,
    MODEL,
    NORMED_HEADS,
    RMS_NORM,
    ROUTER,
    SIGMOID,
    SIZES,
    put_experts,
    put_heads,
    put_heads_and_rope,
    put_layers_without_predictors,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import ONE_ROW
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import put_windows

#: The value of `tokenizer.ggml.pre` by which a file of the architecture `glm4moe` is of Solar Open.
SOLAR_OPEN = "solar-open"
WIDTH = "expert_feed_forward_length"


def _gpt_oss(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_experts(metadata, settings, "num_local_experts", width=None)
    settings.copy("intermediate_size", WIDTH)
    put_windows(metadata, settings, usual=2)
    put_rope(metadata, settings)
    metadata.expect("rope.freq_base_swa", settings["rope_parameters"]["rope_theta"], "is not that of the other layers")
    if settings["rope_parameters"]["rope_type"] == "yarn":
        # No key states it: the original does not round YaRN's correction range to whole dimensions.
        settings["rope_parameters"]["truncate"] = False


def _minimax_m2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_rope(metadata, settings, partial=True)
    put_experts(metadata, settings, "num_local_experts", width=None)
    settings.copy("intermediate_size", WIDTH)
    metadata.expect("expert_gating_func", SIGMOID, "is another choice of experts than the model's sigmoid")


def _routing(metadata: MetadataReader, settings: ConfigSettings, shared: str) -> None:
    """Put the router's settings of GLM, dots and EXAONE."""
    metadata.expect("expert_gating_func", SIGMOID, "is another choice of experts than the model's sigmoid")
    settings.copy(shared, "expert_shared_count")
    settings.put("first_k_dense_replace", metadata.scalar("leading_dense_block_count", 0), "leading_dense_block_count")
    settings.put("routed_scaling_factor", metadata.scalar("expert_weights_scale", 0.0) or 1.0, "expert_weights_scale")
    settings.put("norm_topk_prob", metadata.scalar("expert_weights_norm", False), "expert_weights_norm")
    settings.put("n_group", 1)
    settings.put("topk_group", 1)


def _glm4_moe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_layers_without_predictors(metadata, settings)
    put_heads(metadata, settings)
    put_rope(metadata, settings, partial=True)
    is_solar = metadata.file.get("tokenizer.ggml.pre") == SOLAR_OPEN
    if is_solar and metadata.config is None and settings["rope_parameters"]["partial_rotary_factor"] != 1:
        raise metadata.unsupported("rope.dimension_count", "is wrong for Solar Open, which rotates whole heads")
    put_experts(metadata, settings, "n_routed_experts")
    _routing(metadata, settings, "n_shared_experts")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("use_qk_norm", metadata.has_tensor("attn_q_norm.weight"))


def _afmoe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_experts(metadata, settings, "num_experts")
    settings.copy("num_shared_experts", "expert_shared_count")
    settings.put("num_dense_layers", metadata.scalar("leading_dense_block_count", 0), "leading_dense_block_count")
    settings.put("route_scale", metadata.scalar("expert_weights_scale", 0.0) or 1.0, "expert_weights_scale")
    if not metadata.scalar("expert_weights_norm", False):
        raise metadata.unsupported("expert_weights_norm", "does not normalize weights of experts, which the model does")
    metadata.expect("expert_gating_func", SIGMOID, "is another choice of experts than the model's sigmoid")
    put_windows(metadata, settings, usual=4)
    put_rope(metadata, settings)
    metadata.expect("rope.freq_base_swa", settings["rope_parameters"]["rope_theta"], "is not that of the other layers")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    # No key states it: llama.cpp multiplies embeddings by the root of their length, as all published models do.
    settings.put("mup_enabled", True)


def _dots1(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    put_experts(metadata, settings, "n_routed_experts")
    _routing(metadata, settings, "n_shared_experts")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("sliding_window", None)
    settings.put("layer_types", ["full_attention"] * settings["num_hidden_layers"])


def _exaone_moe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_layers_without_predictors(metadata, settings)
    put_heads(metadata, settings)
    put_experts(metadata, settings, "num_experts")
    _routing(metadata, settings, "num_shared_experts")
    dense = settings.values.pop("first_k_dense_replace")
    settings.from_file.pop("first_k_dense_replace", None)
    layers = settings["num_hidden_layers"]
    kinds = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    settings.put("mlp_layer_types", kinds, "leading_dense_block_count")
    shared = settings["num_shared_experts"] * settings["moe_intermediate_size"]
    metadata.expect("expert_shared_feed_forward_length", shared, f"is not the {shared} of all shared experts")
    put_windows(metadata, settings, usual=4)
    put_rope(metadata, settings)
    metadata.expect("rope.freq_base_swa", settings["rope_parameters"]["rope_theta"], "is not that of the other layers")


def _olmoe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    put_experts(metadata, settings, "num_experts", width=None)
    # llama.cpp does not normalise the weights of chosen experts.
    settings.put("norm_topk_prob", False)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("clip_qkv", metadata.scalar("attention.clamp_kqv", 0.0) or None, "attention.clamp_kqv")


def _ernie_moe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    settings.copy("moe_num_experts", "expert_count")
    settings.copy("moe_k", "expert_used_count")
    settings.copy("moe_intermediate_size", WIDTH)
    settings.copy("moe_num_shared_experts", "expert_shared_count")
    settings.copy("moe_layer_interval", "interleave_moe_layer_step")
    settings.put("moe_layer_start_index", metadata.scalar("leading_dense_block_count", 0), "leading_dense_block_count")
    settings.put("moe_layer_end_index", settings["num_hidden_layers"] - 1)
    settings.put("use_bias", metadata.has_tensor("attn_q.bias"))


def _hunyuan_moe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    settings.copy("num_experts", "expert_count")
    settings.copy("moe_topk", "expert_used_count")
    for width in (WIDTH, "expert_shared_feed_forward_length"):
        metadata.expect(
            width, settings["intermediate_size"], "is not feed_forward_length, and the model has one width only"
        )
    metadata.expect("expert_shared_count", 1, "is not 1, the model's number of shared experts")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


_KEYS = {**SIZES, **RMS_NORM}
_SAME_WIDTH = {"feed_forward_length": f"{WIDTH} is the width, and every layer has experts"}
SHARED_EXPERTS: Places = {
    **ROUTER,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}

GPT_OSS = Architecture(
    "gpt-oss",
    ("gpt_oss",),
    {name: setting for name, setting in _KEYS.items() if name != "feed_forward_length"},
    MODEL,
    {
        **{name: place for name, place in ATTENTION.items() if name != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
    _gpt_oss,
    without_effect=_SAME_WIDTH,
)
MINIMAX_M2 = Architecture(
    "minimax-m2",
    ("minimax_m2",),
    {name: setting for name, setting in _KEYS.items() if name != "feed_forward_length"},
    MODEL,
    {**ATTENTION, **NORMED_HEADS, **ROUTER, "exp_probs_b.bias": "mlp.e_score_correction_bias"},
    _minimax_m2,
    without_effect=_SAME_WIDTH,
)
GLM4_MOE = Architecture(
    "glm4moe",
    ("glm4_moe", "solar_open"),
    _KEYS,
    MODEL,
    {
        **{name: place for name, place in ATTENTION.items() if name != "ffn_norm"},
        **NORMED_HEADS,
        **GATED,
        **SHARED_EXPERTS,
        "post_attention_norm": "post_attention_layernorm",
    },
    _glm4_moe,
    predicts=True,
)
DOTS1 = Architecture(
    "dots1", ("dots1",), _KEYS, MODEL, {**ATTENTION, **NORMED_HEADS, **GATED, **SHARED_EXPERTS}, _dots1
)
EXAONE_MOE = Architecture(
    "exaone-moe",
    ("exaone_moe",),
    _KEYS,
    MODEL,
    {**ATTENTION, **NORMED_HEADS, **GATED, **SHARED_EXPERTS},
    _exaone_moe,
    predicts=True,
)

AFMOE = Architecture(
    "afmoe",
    ("afmoe",),
    _KEYS,
    MODEL,
    {
        **ATTENTION,
        **NORMED_HEADS,
        **GATED,
        **SHARED_EXPERTS,
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_gate_inp": "mlp.router.gate",
        "exp_probs_b.bias": "mlp.expert_bias",
    },
    _afmoe,
)
OLMOE = Architecture("olmoe", ("olmoe",), _KEYS, MODEL, {**ATTENTION, **NORMED_HEADS, **ROUTER}, _olmoe)
ERNIE_MOE = Architecture(
    "ernie4_5-moe",
    ("ernie4_5_moe",),
    _KEYS,
    MODEL,
    {
        **ATTENTION,
        **GATED,
        **SHARED_EXPERTS,
        "exp_probs_b.bias": ParameterPlace("mlp.gate.moe_statics.e_score_correction_bias", ONE_ROW),
    },
    _ernie_moe,
    without_effect={"expert_shared_feed_forward_length": "each shared expert is as wide as the others"},
)
HUNYUAN_MOE = Architecture(
    "hunyuan-moe",
    ("hunyuan_v1_moe",),
    _KEYS,
    MODEL,
    {
        **ATTENTION,
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
        "ffn_gate_inp": "mlp.gate.wg",
        "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
        "ffn_up_shexp": "mlp.shared_mlp.up_proj",
        "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    },
    _hunyuan_moe,
)

TABLES = (AFMOE, GPT_OSS, MINIMAX_M2, GLM4_MOE, DOTS1, EXAONE_MOE, OLMOE, ERNIE_MOE, HUNYUAN_MOE)
