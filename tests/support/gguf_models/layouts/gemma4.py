"""Gemma 4."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.gguf_models.layouts.keys import RMS, SIZES, window_pattern
from tests.support.gguf_models.layouts.layout import Layout
from tests.support.gguf_models.layouts.names import ATTENTION, GATED, HEAD_NORMS, MODEL
from tests.support.gguf_models.layouts.rotation import BASE, rotation_of

NOT_ROTATED = 1e30


def _of(kind: str, config: Any) -> Any:
    """The settings of a layer of this kind."""
    return config.per_layer_config[config.layer_types.index(kind)]


def _head_dim(config: Any) -> int:
    return int(_of("full_attention", config).head_dim)


def _head_dim_in_window(config: Any) -> int:
    return int(_of("sliding_attention", config).head_dim)


def _kv_heads(config: Any) -> int | list[int]:
    heads = [int(_of(kind, config).num_key_value_heads) for kind in config.layer_types]
    return heads if config.attention_k_eq_v else heads[0]


def _widths(config: Any) -> int | list[int]:
    width, layers = config.intermediate_size, config.num_hidden_layers
    if not config.use_double_wide_mlp:
        return int(width)
    own = layers - config.num_kv_shared_layers
    return [width if layer < own else 2 * width for layer in range(layers)]


def _extra(config: Any) -> dict[str, np.ndarray]:
    """Factors of frequencies, and what the original has of layers with other layers' keys, which nothing reads."""
    pairs = _head_dim(config) // 2
    rotated = int(_head_dim(config) * rotation_of(config)["partial_rotary_factor"] / 2)
    found = {"rope_freqs.weight": np.array([1.0] * rotated + [NOT_ROTATED] * (pairs - rotated), np.float32)}
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
        dim = config.per_layer_config[layer].head_dim
        rows = config.num_key_value_heads * dim
        found[f"blk.{layer}.attn_k.weight"] = np.full((rows, config.hidden_size), 3, np.float32)
        found[f"blk.{layer}.attn_v.weight"] = np.full((rows, config.hidden_size), 3, np.float32)
        found[f"blk.{layer}.attn_k_norm.weight"] = np.full(dim, 3, np.float32)
    return found


#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "gemma4_text": Layout(
        "gemma4",
        {
            **SIZES,
            **RMS,
            **BASE,
            "feed_forward_length": _widths,
            "rope.freq_base_swa": lambda config: rotation_of(config, "sliding_attention")["rope_theta"],
            "rope.dimension_count": _head_dim,
            "rope.dimension_count_swa": _head_dim_in_window,
            "attention.head_count_kv": _kv_heads,
            "attention.key_length": _head_dim,
            "attention.value_length": _head_dim,
            "attention.key_length_swa": _head_dim_in_window,
            "attention.value_length_swa": _head_dim_in_window,
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": window_pattern,
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        {
            **ATTENTION,
            **GATED,
            **HEAD_NORMS,
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "router.proj": "ffn_gate_inp",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "experts.down_proj": "ffn_down_exps.weight",
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "layer_scalar": "layer_output_scale.weight",
        },
        {
            **MODEL,
            "model.embed_tokens_per_layer": "per_layer_token_embd",
            "model.per_layer_model_projection": "per_layer_model_proj",
            "model.per_layer_projection_norm": "per_layer_proj_norm",
        },
        pieces=True,
        extra=_extra,
    ),
}
