"""HRM-Text: two stacks of layers, which every token passes several times in turn.

Sources: `conversion/hrm_text.py` and `src/models/hrm-text.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import ATTENTION, GATED, RMS_NORM, SIZES
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader
from hetero_kv.models.gguf.architectures.rope import put_rope


def _hrm_text(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.copy("num_layers_per_stack", "hrm.layers_per_stack")
    settings.copy("H_cycles", "hrm.h_cycles")
    settings.copy("L_cycles", "hrm.l_cycles")
    passes = settings["num_layers_per_stack"] * settings["H_cycles"] * (settings["L_cycles"] + 1)
    if settings["num_hidden_layers"] != passes:
        raise metadata.unsupported(
            "block_count", f"is not the {passes} by hrm.layers_per_stack, hrm.h_cycles and hrm.l_cycles"
        )
    metadata.expect("hrm.prefix_lm", False, "attends to a prompt in both directions, which is not computed here")
    settings.put("prefix_lm", False, "hrm.prefix_lm")
    settings.put("embedding_scale", metadata.scalar("embedding_scale", 0.0) or 1.0, "embedding_scale")
    heads, usual = settings["num_attention_heads"], settings["hidden_size"] // settings["num_attention_heads"]
    metadata.expect("attention.head_count_kv", heads, f"is not the {heads} of attention.head_count, as in the model")
    dim = metadata.scalar("attention.key_length", usual)
    metadata.expect("attention.value_length", dim, f"is not the key's {dim}")
    settings.put("head_dim", dim, "attention.key_length")
    put_rope(metadata, settings)
    settings.put("attention_bias", False)
    settings.put("mlp_bias", False)


TABLES = (
    Architecture(
        "hrm_text",
        ("hrm_text",),
        {**SIZES, **RMS_NORM},
        {"token_embd": "/model.embed_tokens", "output": "/lm_head", "hrm.z_l_init": "/model.z_L_init"},
        {
            **{name: place for name, place in ATTENTION.items() if not name.endswith("norm")},
            **GATED,
            "attn_gate": "self_attn.gate_proj",
        },
        _hrm_text,
        stacks=("model.L_module.layers", "model.H_module.layers"),
    ),
)
