"""Kimi Linear: layers with Kimi delta attention between layers with multi-head latent attention.

Sources: `conversion/kimi_linear.py` and `src/models/kimi-linear.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hetero_kv.models.gguf.architectures.common import MODEL, RMS_NORM, SIGMOID, SIZES, put_experts
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.deepseek import LATENT_LAYER, put_latent_sizes
from hetero_kv.models.gguf.architectures.inverse_transforms import InverseTransform

KV_HEADS = "attention.head_count_kv"


def _kimi_linear(metadata: MetadataReader, settings: ConfigSettings) -> None:
    layers = settings["num_hidden_layers"]
    groups = metadata.get(KV_HEADS)
    if not isinstance(groups, tuple | list) or not set(groups) <= {0, 1}:
        raise metadata.unsupported(KV_HEADS, "is not 0 or 1 for each layer, which says whether it is linear")
    settings.put("layer_types", ["full_attention" if count else "linear_attention" for count in groups], KV_HEADS)
    put_latent_sizes(metadata, settings, "attention.key_length_mla", "attention.value_length_mla")
    cached = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    metadata.expect("attention.key_length", cached, f"is not the {cached} of a latent and a rotated key")
    settings.copy("linear_conv_kernel_dim", "ssm.conv_kernel")
    settings.copy("linear_head_dim", "kda.head_dim")
    settings.put("linear_num_heads", settings["num_attention_heads"])
    put_experts(metadata, settings, "num_local_experts")
    settings.copy("n_shared_experts", "expert_shared_count")
    settings.put("routed_scaling_factor", metadata.scalar("expert_weights_scale", 0.0) or 1.0, "expert_weights_scale")
    metadata.expect("expert_gating_func", SIGMOID, "is another choice of experts than the model's sigmoid")
    # No key states it: llama.cpp normalizes the weights of chosen experts.
    settings.put("norm_topk_prob", True)
    dense = metadata.scalar("leading_dense_block_count", 0)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    settings.put("mlp_layer_types", kinds, "leading_dense_block_count")


def _convolution_rows(part: int, config: Any) -> np.ndarray:
    count = config.linear_num_heads * config.linear_head_dim
    return part * count + np.arange(count)


#: [1, channels, 1, width] in a file, or without the first.
_CONVOLUTION = InverseTransform(numbers=lambda numbers: numbers.reshape(-1, 1, numbers.shape[-1]))
_LOGARITHM = InverseTransform(numbers=lambda numbers: np.log(-numbers.reshape(1, 1, -1, 1)))


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

TABLES = (
    Architecture(
        "kimi-linear",
        ("kimi_linear",),
        {**SIZES, **RMS_NORM},
        MODEL,
        _LAYER,
        _kimi_linear,
        without_effect={
            "attention.value_length": "attention.value_length_mla says the size of values",
            "rope.freq_base": "the model rotates nothing",
        },
    ),
)
