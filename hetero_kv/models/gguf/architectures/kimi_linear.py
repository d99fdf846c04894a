"""Kimi Linear and Ling 3: layers with Kimi delta attention between layers with multi-head latent attention.

Sources: `conversion/kimi_linear.py`, `bailingmoe3.py` and `src/models/` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hetero_kv.models.gguf.architectures.common import (
    MODEL,
    RMS_NORM,
    SIGMOID,
    SIZES,
    put_experts,
    put_layers_without_predictors,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.deepseek import LATENT_LAYER, put_expert_groups, put_latent_sizes
from hetero_kv.models.gguf.architectures.inverse_transforms import InverseTransform
from hetero_kv.models.gguf.architectures.rope import put_rope

KV_HEADS = "attention.head_count_kv"


def _kimi_linear(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _put_layers(metadata, settings)
    settings.copy("linear_conv_kernel_dim", "ssm.conv_kernel")
    settings.copy("linear_head_dim", "kda.head_dim")
    settings.put("linear_num_heads", settings["num_attention_heads"])
    put_experts(metadata, settings, "num_local_experts")
    _put_router(metadata, settings)
    # No key states it: llama.cpp normalizes the weights of chosen experts.
    settings.put("norm_topk_prob", True)


def _ling3(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_layers_without_predictors(metadata, settings)
    _put_layers(metadata, settings)
    settings.values["head_dim"] = settings["qk_rope_head_dim"]
    put_rope(metadata, settings)
    # The size of heads of linear layers; the configuration derives the other one.
    settings.values["head_dim"] = metadata.require("kda.head_dim", "linear_head_dim")
    settings.copy("short_conv_kernel_size", "ssm.conv_kernel")
    metadata.expect("kda.safe_gate", True, "is another gate than llama.cpp's")
    settings.put("kda_safe_gate", True)
    settings.copy("kda_lower_bound", "kda.gate_lower_bound")
    settings.copy("n_routed_experts", "expert_count")
    settings.copy("num_experts_per_tok", "expert_used_count")
    settings.copy("moe_intermediate_size", "expert_feed_forward_length")
    put_expert_groups(metadata, settings)
    settings.put("num_local_experts", settings.values.pop("n_routed_experts"), "expert_count")
    settings.from_file.pop("n_routed_experts", None)
    _put_router(metadata, settings)
    shared = settings["n_shared_experts"] * settings["moe_intermediate_size"]
    metadata.expect("expert_shared_feed_forward_length", shared, f"is not the {shared} of all shared experts")
    settings.put("norm_topk_prob", metadata.scalar("expert_weights_norm", False), "expert_weights_norm")
    for limit in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        metadata.expect(limit, 0.0, "limits gates of experts, which transformers' class does not")


def _put_layers(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put which layers are linear, and the sizes of latent attention."""
    groups = metadata.get(KV_HEADS)
    if not isinstance(groups, tuple | list) or not set(groups) <= {0, 1}:
        raise metadata.unsupported(KV_HEADS, "is not 0 or 1 for each layer, which says whether it is linear")
    kinds = ["full_attention" if count else "linear_attention" for count in groups]
    settings.put("layer_types", kinds[: settings["num_hidden_layers"]], KV_HEADS)
    put_latent_sizes(metadata, settings, "attention.key_length_mla", "attention.value_length_mla")
    cached = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    metadata.expect("attention.key_length", cached, f"is not the {cached} of a latent and a rotated key")


def _put_router(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.copy("n_shared_experts", "expert_shared_count")
    settings.put("routed_scaling_factor", metadata.scalar("expert_weights_scale", 0.0) or 1.0, "expert_weights_scale")
    metadata.expect("expert_gating_func", SIGMOID, "is another choice of experts than the model's sigmoid")
    dense = metadata.scalar("leading_dense_block_count", 0)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(settings["num_hidden_layers"])]
    settings.put("mlp_layer_types", kinds, "leading_dense_block_count")


def _convolution_rows(part: int, config: Any) -> np.ndarray:
    count = config.linear_num_heads * config.linear_head_dim
    return part * count + np.arange(count)


#: [1, channels, 1, width] in a file, or without the first.
_CONVOLUTION = InverseTransform(numbers=lambda numbers: numbers.reshape(-1, 1, numbers.shape[-1]))
_LOGARITHM = InverseTransform(numbers=lambda numbers: np.log(-numbers.reshape(1, 1, -1, 1)))

#: Of Ling, whose file has the decay without its sign.
_LOGARITHM_OF_DECAY = InverseTransform(numbers=lambda numbers: np.log(numbers.reshape(-1)))


def _convolution(part: int) -> ParameterPlace:
    return ParameterPlace("self_attn.conv1d.weight", _CONVOLUTION, partial(_convolution_rows, part))


_LAYER: Places = {
    **LATENT_LAYER,
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ssm_conv1d_q.weight": _convolution(0),
    "ssm_conv1d_k.weight": _convolution(1),
    "ssm_conv1d_v.weight": _convolution(2),
    "ssm_a": ParameterPlace("self_attn.forget_gate.A_log", _LOGARITHM),
    "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
    "ssm_f_a": "self_attn.forget_gate.f_a_proj",
    "ssm_f_b": "self_attn.forget_gate.f_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_norm": "self_attn.o_norm",
}

_LING_LAYER: Places = {
    **_LAYER,
    "attn_gate": "self_attn.g_proj",
    "ssm_a": ParameterPlace("self_attn.forget_gate.A_log", _LOGARITHM_OF_DECAY),
    "ssm_f_a": "self_attn.forget_gate.f_proj",
    "ssm_g_a": "self_attn.g_proj",
}
_VALUES = {"attention.value_length": "attention.value_length_mla says the size of values"}

TABLES = (
    Architecture(
        "bailingmoe3",
        ("bailing_hybrid",),
        {**SIZES, **RMS_NORM},
        MODEL,
        _LING_LAYER,
        _ling3,
        predicts=True,
        without_effect=_VALUES,
    ),
    Architecture(
        "kimi-linear",
        ("kimi_linear",),
        {**SIZES, **RMS_NORM},
        MODEL,
        _LAYER,
        _kimi_linear,
        without_effect={**_VALUES, "rope.freq_base": "the model rotates nothing"},
    ),
)
