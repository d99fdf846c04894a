"""Granite with sliding windows and attention sinks, dense and as a mixture.

Sources: `conversion/granite.py` and `src/models/granite-swa.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import GATED, MODEL, RMS_NORM, SIZES, put_experts, put_heads
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader
from hetero_kv.models.gguf.architectures.llama import REORDERED, SHARED_WIDTH, put_biases, put_granite_scales
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import PATTERN, put_windows

ROTATED_LAYERS = "attention.rope_pattern"


def _granite_swa(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    put_granite_scales(metadata, settings)
    if not isinstance(metadata.get(PATTERN), tuple | list):
        raise metadata.unsupported(PATTERN, "is no list of the layers with a window, which models differ in")
    put_windows(metadata, settings, usual=4)
    _put_rotated_layers(metadata, settings)
    if not metadata.scalar("expert_count", 0):
        metadata.expect("expert_used_count", 0, "chooses experts, and the file has none")
        put_biases(metadata, settings)
        return
    settings.values["model_type"] = "granitemoe_swa"
    put_experts(metadata, settings, "num_local_experts", width=None)
    settings.put("shared_intermediate_size", metadata.scalar(SHARED_WIDTH, 0), SHARED_WIDTH)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


def _put_rotated_layers(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put `layer_rope_theta`, which is 0 for layers without RoPE; a file has one base for all others."""
    layers, base = settings["num_hidden_layers"], settings["rope_parameters"]["rope_theta"]
    rotated = metadata.get(ROTATED_LAYERS, [True] * layers)
    if len(rotated) != layers:
        raise metadata.unsupported(ROTATED_LAYERS, f"has not one value for each of {layers} layers")
    settings.put("layer_rope_theta", [base if each else 0 for each in rotated], ROTATED_LAYERS)


TABLES = (
    Architecture(
        "granite_swa",
        ("granite_swa", "granitemoe_swa"),
        {**SIZES, **RMS_NORM},
        MODEL,
        {
            **REORDERED,
            **GATED,
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "block_sparse_moe.router",
            # Gate and up of the experts that all tokens have, as in the model.
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        _granite_swa,
    ),
)
