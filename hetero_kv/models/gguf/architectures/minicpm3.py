"""MiniCPM 3: latent attention with the scales of MiniCPM.

Sources: `conversion/minicpm.py` and `src/models/minicpm3.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import GATED, MODEL, RMS_NORM, SIZES
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader
from hetero_kv.models.gguf.architectures.deepseek import LATENT_LAYER, put_latent_sizes
from hetero_kv.models.gguf.architectures.rope import put_rope

#: llama.cpp's factors; no key states them.
EMBEDDING_SCALE, DEPTH_SCALE, BASE_WIDTH = 12, 1.4, 256
VALUE = "attention.value_length"


def _minicpm3(metadata: MetadataReader, settings: ConfigSettings) -> None:
    heads = settings["num_attention_heads"]
    metadata.expect("attention.head_count_kv", heads, "is not the number of heads")
    settings.put("v_head_dim", settings["hidden_size"] // heads)
    metadata.expect(VALUE, settings["v_head_dim"], "is not the hidden size divided by the heads")
    put_latent_sizes(metadata, settings, "attention.key_length", None)
    settings.values["head_dim"] = settings["qk_rope_head_dim"]
    put_rope(metadata, settings, original=settings["max_position_embeddings"])
    settings.put("scale_emb", EMBEDDING_SCALE)
    settings.put("scale_depth", DEPTH_SCALE)
    settings.put("dim_model_base", BASE_WIDTH)
    settings.put("attention_bias", metadata.has_tensor("attn_q_a.bias"))


TABLES = (Architecture("minicpm3", ("minicpm3",), {**SIZES, **RMS_NORM}, MODEL, {**LATENT_LAYER, **GATED}, _minicpm3),)
