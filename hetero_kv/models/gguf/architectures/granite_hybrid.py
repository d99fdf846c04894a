"""Granite 4: Mamba 2 between attention layers.

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
from hetero_kv.models.gguf.architectures.inverse_transforms import (
    CONVOLUTION,
    FLAT,
    FLAT_LOGARITHM,
    SHARED_GATE_ROWS,
    SHARED_UP_ROWS,
)
from hetero_kv.models.gguf.architectures.llama import REORDERED, put_granite_scales
from hetero_kv.models.gguf.architectures.rope import put_rope

KV_HEADS = "attention.head_count_kv"
SHARED_WIDTH = "expert_shared_feed_forward_length"


def _granite_hybrid(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _put_layers(metadata, settings)
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
    width, heads = settings["hidden_size"], settings["mamba_n_heads"]
    inner = metadata.scalar("ssm.inner_size", 2 * width)
    if inner % width or inner % heads or inner % settings["mamba_n_groups"]:
        raise metadata.unsupported("ssm.inner_size", f"does not fit {heads} heads and the hidden size {width}")
    settings.put("mamba_expand", inner // width, "ssm.inner_size")
    settings.put("mamba_d_head", inner // heads, "ssm.inner_size")
    settings.put("mamba_conv_bias", metadata.has_tensor("ssm_conv1d.bias"))
    settings.put("mamba_proj_bias", metadata.has_tensor("ssm_in.bias"))


_LAYER: Places = {
    **REORDERED,
    "ffn_gate_inp": "block_sparse_moe.router",
    # A model without experts has only what others share.
    **{f"ffn_gate{end}": ParameterPlace("shared_mlp.input_linear", part=SHARED_GATE_ROWS) for end in ("", "_shexp")},
    **{f"ffn_up{end}": ParameterPlace("shared_mlp.input_linear", part=SHARED_UP_ROWS) for end in ("", "_shexp")},
    **{f"ffn_down{end}": "shared_mlp.output_linear" for end in ("", "_shexp")},
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d.weight": ParameterPlace("mamba.conv1d.weight", CONVOLUTION),
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": ParameterPlace("mamba.A_log", FLAT_LOGARITHM),
    "ssm_d": ParameterPlace("mamba.D", FLAT),
    "ssm_norm": ParameterPlace("mamba.norm", FLAT),
    "ssm_out": "mamba.out_proj",
}

TABLES = (Architecture("granitehybrid", ("granitemoehybrid",), {**SIZES, **RMS_NORM}, MODEL, _LAYER, _granite_hybrid),)
