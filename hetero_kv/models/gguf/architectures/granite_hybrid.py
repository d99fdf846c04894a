"""Granite 4, and Bamba: Mamba 2 between attention layers.

Sources: `conversion/granite.py`, `conversion/mamba.py` and `src/models/granite-hybrid.cpp` of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import MODEL, RMS_NORM, SIZES, put_experts
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import SHARED_GATE_ROWS, SHARED_UP_ROWS
from hetero_kv.models.gguf.architectures.llama import GRANITE_SCALES, REORDERED, put_granite_scales
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.architectures.state_space import mamba2_places, put_inner_size

KV_HEADS = "attention.head_count_kv"
SHARED_WIDTH = "expert_shared_feed_forward_length"


def _granite_hybrid(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _put_layers(metadata, settings)
    if not any(metadata.has(suffix) for suffix in GRANITE_SCALES):
        _bamba(metadata, settings)
        return
    put_granite_scales(metadata, settings)
    put_rope(metadata, settings)
    # llama.cpp's switch for RoPE.
    is_rotated = metadata.scalar("rope.scaling.finetuned", True)
    settings.put("position_embedding_type", "rope" if is_rotated else None, "rope.scaling.finetuned")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    _put_mamba(metadata, settings)
    width = settings["intermediate_size"]
    if metadata.scalar("expert_count", 0):
        put_experts(metadata, settings, "num_local_experts", width=None)
        settings.copy("shared_intermediate_size", SHARED_WIDTH)
    else:
        metadata.expect("expert_used_count", 0, "chooses experts, and the file has none")
        metadata.expect(SHARED_WIDTH, width, f"is not the {width} of feed_forward_length")
        settings.put("num_local_experts", 0)
        settings.put("shared_intermediate_size", width)


def _bamba(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.values["model_type"] = "bamba"
    kinds = settings.values.pop("layer_types")
    attending = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    settings.from_file.pop("layer_types", None)
    settings.put("attn_layer_indices", attending, KV_HEADS)
    metadata.expect("rope.scaling.finetuned", True, "means a model without RoPE, and Bamba has it")
    put_rope(metadata, settings, partial=True)
    if settings["rope_parameters"]["partial_rotary_factor"] == 1 and metadata.config is None:
        raise metadata.unsupported("rope.dimension_count", "is wrong for Bamba, which rotates a half of each head")
    for suffix in ("expert_count", "expert_used_count"):
        metadata.expect(suffix, 0, "counts experts, which Bamba does not have")
    _put_mamba(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("mlp_bias", metadata.has_tensor("ffn_down.bias"))


def _put_layers(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put which layers attend: those with key heads."""
    heads, layers = settings["num_attention_heads"], settings["num_hidden_layers"]
    groups = metadata.get(KV_HEADS, heads)
    per_layer = list(groups) if isinstance(groups, tuple | list) else [groups] * layers
    attending = {count for count in per_layer if count}
    if len(attending) != 1 or heads % min(attending):
        raise metadata.unsupported(KV_HEADS, "differs between attention layers, or does not divide the heads")
    settings.put("num_key_value_heads", min(attending), KV_HEADS)
    kinds = ["full_attention" if count else "linear_attention" for count in per_layer]
    settings.put("layer_types", kinds, KV_HEADS)
    dim = settings["hidden_size"] // heads
    for suffix in ("attention.key_length", "attention.value_length"):
        metadata.expect(suffix, dim, f"is not the hidden size divided by the heads, {dim}")


def _put_mamba(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.copy("mamba_d_conv", "ssm.conv_kernel")
    settings.copy("mamba_d_state", "ssm.state_size")
    settings.copy("mamba_n_groups", "ssm.group_count")
    settings.copy("mamba_n_heads", "ssm.time_step_rank")
    put_inner_size(metadata, settings, "mamba_expand", "mamba_d_head")
    settings.put("mamba_conv_bias", metadata.has_tensor("ssm_conv1d.bias"))
    settings.put("mamba_proj_bias", metadata.has_tensor("ssm_in.bias"))


_GATE = ParameterPlace("shared_mlp.input_linear", part=SHARED_GATE_ROWS)
_UP = ParameterPlace("shared_mlp.input_linear", part=SHARED_UP_ROWS)
_DOWN = "shared_mlp.output_linear"
_LAYER: Places = {
    **REORDERED,
    **mamba2_places("mamba"),
    "ffn_norm": ("post_attention_layernorm", "pre_ff_layernorm"),
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_shexp": _GATE,
    "ffn_up_shexp": _UP,
    "ffn_down_shexp": _DOWN,
    # A Granite model without experts has only what others share; the second places are Bamba's.
    "ffn_gate": (_GATE, "feed_forward.gate_proj"),
    "ffn_up": (_UP, "feed_forward.up_proj"),
    "ffn_down": (_DOWN, "feed_forward.down_proj"),
}

TABLES = (
    Architecture(
        "granitehybrid",
        ("granitemoehybrid", "bamba"),
        {**SIZES, **RMS_NORM},
        {**MODEL, "output_norm": ("norm", "final_layernorm")},
        _LAYER,
        _granite_hybrid,
    ),
)
