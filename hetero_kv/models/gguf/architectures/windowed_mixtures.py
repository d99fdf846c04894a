"""Mixtures of experts whose layers with a window rotate otherwise than those without.

These are Command A MoE, Laguna, Mellum and MiMo V2. Hunyuan 3 is among them for its router.

Sources: `conversion/command_r.py`, `hunyuan.py`, `laguna.py`, `mellum.py`, `mimo.py` and `src/models/` of https://github.com/ggml-org/llama.cpp.
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
    SOFTMAX,
    put_experts,
    put_heads,
    put_heads_and_rope,
    put_layers_without_predictors,
)
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader
from hetero_kv.models.gguf.architectures.mixtures import SHARED_EXPERTS
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import PATTERN, WINDOW, put_rope_by_window, put_windows


def _mellum(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_experts(metadata, settings, "num_experts")
    put_windows(metadata, settings, usual=4, may_be_none=True)
    put_rope(metadata, settings)
    put_rope_by_window(metadata, settings)
    settings.put("norm_topk_prob", True)
    settings.put("mlp_layer_types", ["sparse"] * settings["num_hidden_layers"])
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


def _cohere2_moe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_layers_without_predictors(metadata, settings)
    put_heads(metadata, settings)
    put_rope(metadata, settings)
    metadata.expect("rope.freq_base_swa", settings["rope_parameters"]["rope_theta"], "is not that of the other layers")
    put_windows(metadata, settings, usual=4, full_first=True)
    put_experts(metadata, settings, "num_experts", width=None)
    settings.copy("intermediate_size", "expert_feed_forward_length")
    settings.copy("logit_scale", "logit_scale")
    gating = metadata.scalar("expert_gating_func", 0) or SIGMOID
    if gating not in (SIGMOID, SOFTMAX):
        raise metadata.unsupported("expert_gating_func", "is no choice of experts of this model")
    settings.put("expert_selection_fn", "sigmoid" if gating == SIGMOID else "softmax", "expert_gating_func")
    settings.put("norm_topk_prob", metadata.scalar("expert_weights_norm", False), "expert_weights_norm")
    if gating == SOFTMAX and not settings["norm_topk_prob"]:
        raise metadata.unsupported("expert_weights_norm", "does not normalize weights of experts, which the model does")
    metadata.expect("expert_weights_scale", 1.0, "multiplies weights of experts, which the model does not")
    settings.put("num_shared_experts", metadata.scalar("expert_shared_count", 0), "expert_shared_count")
    # The mean of a token's own experts and the shared ones, as in llama.cpp.
    settings.put("shared_expert_combination_strategy", "average")
    shared = settings["num_shared_experts"] * settings["intermediate_size"]
    metadata.expect("expert_shared_feed_forward_length", shared, f"is not the {shared} of all shared experts")
    layers, dense = settings["num_hidden_layers"], metadata.scalar("leading_dense_block_count", 0)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    settings.put("mlp_layer_types", kinds, "leading_dense_block_count")
    # Dense layers rotate, whether or not they have a window.
    settings.put("prefix_dense_sliding_window_pattern", 1)
    epsilon = metadata.scalar("attention.layer_norm_rms_epsilon", 0.0) or None
    settings.put("rms_norm_eps", epsilon, "attention.layer_norm_rms_epsilon")
    if epsilon is None:
        settings.copy("layer_norm_eps", "attention.layer_norm_epsilon")
    else:
        metadata.get("attention.layer_norm_epsilon")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


def _put_layers_with_router(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put which layers have experts, which no key states."""
    names = metadata.file.tensor_names
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in names for layer in range(settings["num_hidden_layers"])]
    settings.put("mlp_layer_types", ["sparse" if each else "dense" for each in routed])


def _laguna(metadata: MetadataReader, settings: ConfigSettings) -> None:
    layers, heads = settings["num_hidden_layers"], metadata.get(HEADS)
    per_layer = list(heads) if isinstance(heads, tuple | list) else [heads] * layers
    settings.put("num_attention_heads", per_layer[0])
    settings.put("num_attention_heads_per_layer", per_layer, HEADS)
    put_heads(metadata, settings)
    if any(each < 1 or each % (settings["num_key_value_heads"] or 1) for each in per_layer):
        raise metadata.unsupported(HEADS, "is not a multiple of attention.head_count_kv in every layer")
    settings.put("gating", _gating(metadata, per_layer))
    put_windows(metadata, settings, usual=4, may_be_none=True, full_first=True)
    if settings["sliding_window"] is None:
        settings.values.pop("sliding_window")
    put_rope(metadata, settings, partial=True)
    put_rope_by_window(metadata, settings)
    put_experts(metadata, settings, "num_experts")
    settings.copy("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
    metadata.expect("expert_gating_func", SIGMOID, "is another choice of experts than the model's sigmoid")
    if not metadata.scalar("expert_weights_norm", False):
        raise metadata.unsupported("expert_weights_norm", "does not normalize weights of experts, which the model does")
    scale = metadata.scalar("expert_weights_scale", 0.0) or 1.0
    settings.put("moe_routed_scaling_factor", scale, "expert_weights_scale")
    dense = metadata.scalar("leading_dense_block_count", 0)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    settings.put("mlp_layer_types", kinds, "leading_dense_block_count")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


def _gating(metadata: MetadataReader, heads: list[int]) -> str:
    """Whether a layer's gates are one a head or one a number, which the rows of their matrices say."""
    rows = {tensor.name: tensor.shape[0] for tensor in metadata.file.tensors}
    gates = [rows.get(f"blk.{layer}.attn_gate.weight") for layer in range(len(heads))]
    return "per-head" if gates == heads else "per-element"


def _mimo2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_layers_without_predictors(metadata, settings)
    layers = settings["num_hidden_layers"]
    settings.copy("head_dim", "attention.key_length")
    settings.copy("v_head_dim", "attention.value_length")
    settings.put("attention_value_scale", metadata.scalar("attention.value_scale", 1.0) or 1.0, "attention.value_scale")
    if not metadata.has(PATTERN):
        raise metadata.unsupported(PATTERN, "is missing, and models of MiMo differ in it")
    put_windows(metadata, settings, usual=1)
    # The model counts a token itself beside those of its window, as its reference implementation does.
    settings.put("sliding_window", settings["sliding_window"] + 1, WINDOW)
    _put_key_heads_of_windows(metadata, settings, layers)
    put_rope(metadata, settings, partial=True)
    put_rope_by_window(metadata, settings)
    put_experts(metadata, settings, "n_routed_experts")
    metadata.expect("expert_gating_func", SIGMOID, "is another choice of experts than the model's sigmoid")
    settings.put("routed_scaling_factor", metadata.scalar("expert_weights_scale", 0.0) or 1.0, "expert_weights_scale")
    # No key states it: llama.cpp normalizes the weights of chosen experts.
    settings.put("norm_topk_prob", True)
    _put_layers_with_router(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


def _put_key_heads_of_windows(metadata: MetadataReader, settings: ConfigSettings, layers: int) -> None:
    """Put `num_key_value_heads` of layers without a window; those with one have twice as many in MiMo."""
    groups = metadata.get(KV_HEADS, settings["num_attention_heads"])
    per_layer = list(groups)[:layers] if isinstance(groups, tuple | list) else [groups] * layers
    full = min(per_layer)
    if per_layer != [2 * full if kind == SLIDING else full for kind in settings["layer_types"]]:
        raise metadata.unsupported(KV_HEADS, "is not twice as many in layers with a window as in the others")
    settings.put("num_key_value_heads", full, KV_HEADS)


def _hy_v3(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_layers_without_predictors(metadata, settings)
    put_heads_and_rope(metadata, settings)
    put_experts(metadata, settings, "num_experts")
    metadata.expect("expert_gating_func", SIGMOID, "is another choice of experts than the model's sigmoid")
    if not metadata.scalar("expert_weights_norm", False):
        raise metadata.unsupported("expert_weights_norm", "does not normalize weights of experts, which the model does")
    scale = metadata.scalar("expert_weights_scale", 0.0) or 1.0
    settings.put("router_scaling_factor", scale, "expert_weights_scale")
    width, expert = "expert_shared_feed_forward_length", settings["moe_intermediate_size"]
    shared = metadata.scalar(width, expert) or expert
    if shared % expert:
        raise metadata.unsupported(width, f"is not a multiple of the {expert} of an expert")
    settings.put("num_shared_experts", shared // expert, width)
    _put_layers_with_router(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("mlp_bias", metadata.has_tensor("ffn_down.bias"))


#: Kind of a layer with a window, and the keys of the numbers of heads.
SLIDING, HEADS, KV_HEADS = "sliding_attention", "attention.head_count", "attention.head_count_kv"
_KEYS = {**SIZES, **RMS_NORM}

COHERE2_MOE = Architecture(
    "cohere2moe",
    ("cohere2_moe",),
    {name: "prefix_dense_" * (name == "feed_forward_length") + setting for name, setting in SIZES.items()},
    MODEL,
    {
        **{name: place for name, place in ATTENTION.items() if name != "ffn_norm"},
        **GATED,
        **SHARED_EXPERTS,
    },
    _cohere2_moe,
    predicts=True,
)
HY_V3 = Architecture(
    "hy_v3",
    ("hy_v3",),
    _KEYS,
    MODEL,
    {**ATTENTION, **NORMED_HEADS, **GATED, **SHARED_EXPERTS, "exp_probs_b": "mlp.e_score_correction_bias"},
    _hy_v3,
    predicts=True,
)
MELLUM = Architecture(
    "mellum",
    ("mellum",),
    _KEYS,
    MODEL,
    {**ATTENTION, **NORMED_HEADS, **ROUTER},
    _mellum,
)
MIMO2 = Architecture(
    "mimo2",
    ("mimo_v2_flash",),
    _KEYS,
    MODEL,
    {
        **ATTENTION,
        **GATED,
        **ROUTER,
        "attn_sinks.weight": "self_attn.sinks",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    _mimo2,
    predicts=True,
)
LAGUNA = Architecture(
    "laguna",
    ("laguna",),
    {name: setting for name, setting in _KEYS.items() if name != HEADS},
    MODEL,
    {**ATTENTION, **NORMED_HEADS, **GATED, **SHARED_EXPERTS, "attn_gate": "self_attn.g_proj"},
    _laguna,
)

TABLES = (COHERE2_MOE, HY_V3, LAGUNA, MELLUM, MIMO2)
