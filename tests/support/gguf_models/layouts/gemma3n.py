"""Gemma 3n."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.support.gguf_models.layouts.keys import USUAL, window_pattern
from tests.support.gguf_models.layouts.layout import Layout
from tests.support.gguf_models.layouts.names import ATTENTION, GATED, HEAD_NORMS, MODEL
from tests.support.gguf_models.layouts.rotation import rotation_of


def _scales(config: Any) -> list[float]:
    """How many deviations above the mean the activations of a layer begin that it keeps."""
    return [NormalDist().inv_cdf(share) if share else -math.inf for share in config.activation_sparsity_pattern]


def _unused_keys(config: Any) -> dict[str, np.ndarray]:
    """What the original has of layers with other layers' keys, which nothing reads."""
    found = {}
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
        rows = config.num_key_value_heads * config.head_dim
        found[f"blk.{layer}.attn_k.weight"] = np.full((rows, config.hidden_size), 3, np.float32)
        found[f"blk.{layer}.attn_v.weight"] = np.full((rows, config.hidden_size), 3, np.float32)
        found[f"blk.{layer}.attn_k_norm.weight"] = np.full(config.head_dim, 3, np.float32)
    return found


#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "gemma3n_text": Layout(
        "gemma3n",
        {
            **USUAL,
            "rope.freq_base_swa": lambda config: rotation_of(config, "sliding_attention")["rope_theta"],
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": window_pattern,
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "activation_sparsity_scale": _scales,
        },
        {
            **ATTENTION,
            **HEAD_NORMS,
            **GATED,
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "altup.correct_output_scale": "altup_correct_scale.weight",
            "altup.correction_coefs": "altup_correct_coef",
            "altup.prediction_coefs": "altup_predict_coef",
            "altup.modality_router": "altup_router",
            "altup.router_norm": "altup_router_norm",
            "laurel.linear_left": "laurel_l",
            "laurel.linear_right": "laurel_r",
            "laurel.post_laurel_norm": "laurel_post_norm",
        },
        {
            **MODEL,
            "model.embed_tokens_per_layer": "per_layer_token_embd",
            "model.per_layer_model_projection": "per_layer_model_proj",
            "model.per_layer_projection_norm": "per_layer_proj_norm",
            "model.altup_projections.*": "altup_proj",
            "model.altup_unembed_projections.*": "altup_unembd_proj",
        },
        pieces=True,
        extra=_unused_keys,
    ),
}
