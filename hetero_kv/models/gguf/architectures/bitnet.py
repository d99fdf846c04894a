"""BitNet b1.58 of 2024: matrices of -1, 0 and 1, each with a scale.

Its activation is that of llama.cpp, SiLU. BitNet b1.58 2B4T has another one, which no file says.

Sources: `conversion/bitnet.py` and `src/models/bitnet.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.common import ATTENTION, GATED, MODEL, RMS_NORM, SIZES, put_heads
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader
from hetero_kv.models.gguf.architectures.rope import put_rope

VOCABULARY = "tokenizer.ggml.model"


def _bitnet(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_output.bias"))
    kind = metadata.file.get(VOCABULARY, "llama")
    if metadata.config is None and kind != "llama":
        raise ModelError(
            f"{str(metadata.file.path)!r} has {VOCABULARY} {kind!r}, which is that of BitNet b1.58 2B4T, whose "
            "activation differs from llama.cpp's; give the directory or hub id of the configuration as the model and "
            "this file as gguf_path"
        )
    settings.put("hidden_act", "silu")


TABLES = (
    Architecture(
        "bitnet",
        ("bitnet",),
        {**SIZES, **RMS_NORM},
        MODEL,
        {
            **ATTENTION,
            **GATED,
            "attn_sub_norm": "self_attn.attn_sub_norm",
            "ffn_sub_norm": "mlp.ffn_sub_norm",
        },
        _bitnet,
    ),
)
