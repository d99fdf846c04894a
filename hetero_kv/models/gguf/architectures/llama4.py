"""Llama 4, whose layers attend within chunks of a text, and every fourth to all of it without rotation.

Sources: `conversion/llama.py` and `src/models/llama4.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import ATTENTION, MODEL, RMS_NORM, SIZES, put_experts, put_heads
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader, Places
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import WINDOW

#: llama.cpp's sizes of a chunk and of what attention is scaled by, tokens; no key states them.
CHUNK = 8192
#: The number of experts of Maverick, which does not normalize queries and keys.
EXPERTS_OF_MAVERICK = 128


def _llama4(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_rope(metadata, settings)
    put_experts(metadata, settings, "num_local_experts", width=None)
    settings.copy("intermediate_size", "expert_feed_forward_length")
    settings.copy("interleave_moe_layer_step", "interleave_moe_layer_step")
    metadata.expect("expert_weights_scale", 1.0, "multiplies weights of experts, which the model does not")
    settings.put("use_qk_norm", settings["num_local_experts"] != EXPERTS_OF_MAVERICK)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    layers = settings["num_hidden_layers"]
    if metadata.has(WINDOW) and not metadata.scalar(WINDOW):
        # MobileLLM: all layers attend to all tokens, and rotate.
        settings.put("layer_types", ["full_attention"] * layers, WINDOW)
        settings.put("no_rope_layers", [1] * layers)
        return
    metadata.expect(WINDOW, CHUNK, f"is not the {CHUNK} tokens of a chunk that llama.cpp computes with")
    base = settings["rope_parameters"]["rope_theta"]
    metadata.expect("rope.freq_base_swa", base, "is not that of the other layers")
    settings.put("attention_chunk_size", CHUNK)
    settings.put("no_rope_layer_interval", 4)
    settings.put("attn_temperature_tuning", True)
    settings.put("floor_scale", CHUNK)
    settings.put("attn_scale", 0.1)


_LAYER: Places = {
    **ATTENTION,
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}

TABLES = (
    Architecture(
        "llama4",
        ("llama4_text",),
        {name: setting + "_mlp" * (name == "feed_forward_length") for name, setting in {**SIZES, **RMS_NORM}.items()},
        MODEL,
        _LAYER,
        _llama4,
    ),
)
