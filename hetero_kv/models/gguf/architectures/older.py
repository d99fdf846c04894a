"""Older models: Bloom, Falcon, GPT-2, GPT-NeoX, Nemotron, Phi 2 and 3, StableLM, StarCoder 2.

Sources: their files in `conversion/` and `src/models/` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import ATTENTION, GATED, MODEL, RMS_NORM, SIZES, put_heads
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import FALCON_QKV, NORM_PLUS_ONE, QKV_BY_HEAD, TRANSPOSED
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import WINDOW

_FOUR_TIMES = "is not four times the hidden size"
#: The most tokens of a StableLM with llama.cpp's base of RoPE.
CONTEXT_OF_STABLELM = 4096


def _four_times_as_wide(metadata: MetadataReader, settings: ConfigSettings, width: str) -> None:
    metadata.expect("feed_forward_length", 4 * settings[width], _FOUR_TIMES)


def _bloom(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _four_times_as_wide(metadata, settings, "hidden_size")
    metadata.expect("attention.head_count_kv", settings["n_head"], "is not the number of heads")


def _falcon(metadata: MetadataReader, settings: ConfigSettings) -> None:
    heads = settings["num_attention_heads"]
    groups = metadata.scalar("attention.head_count_kv", heads)
    two_norms = metadata.has_tensor("attn_norm_2.weight")
    settings.put("new_decoder_architecture", two_norms or 1 < groups < heads)
    settings.put("multi_query", groups == 1)
    settings.put("num_kv_heads", groups, "attention.head_count_kv")
    settings.put("num_ln_in_parallel_attn", 2 if two_norms else 1)
    settings.put("parallel_attn", True)
    settings.put("alibi", False)
    settings.put("bias", metadata.has_tensor("attn_qkv.bias"))
    settings.put(
        "ffn_hidden_size", metadata.scalar("feed_forward_length", 4 * settings["hidden_size"]), "feed_forward_length"
    )
    metadata.expect("tensor_data_layout", "jploski", "is an unknown order of queries, keys and values")
    put_rope(metadata, settings)


def _gpt2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    width = metadata.scalar("feed_forward_length", 4 * settings["n_embd"])
    if width != 4 * settings["n_embd"]:
        settings.put("n_inner", width, "feed_forward_length")
    metadata.expect("attention.head_count_kv", settings["n_head"], "is not the number of heads")


def _nemotron(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_rope(metadata, settings, partial=True)
    dim, share = settings["head_dim"], settings["hidden_size"] // settings["num_attention_heads"]
    if metadata.has("rope.dimension_count") and dim not in (share, 2 * metadata.scalar("rope.dimension_count")):
        # Its converter writes a part of `share`, whatever a head's size is; the published models rotate half a head.
        if metadata.config is None:
            raise metadata.unsupported(
                "rope.dimension_count", f"is a part of {share}, and the model rotates that part of a head's {dim}"
            )
        settings.from_file["rope_parameters"][1].pop("partial_rotary_factor", None)
    metadata.expect("attention.layer_norm_rms_epsilon", settings["norm_eps"], "differs from layer_norm_epsilon")


def _phi3(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings, partial=True)
    rope = settings["rope_parameters"]
    settings.put("original_max_position_embeddings", rope.get("original_max_position_embeddings", 4096))
    # llama.cpp reads the window and ignores it; the model uses it.
    settings.put("sliding_window", metadata.scalar(WINDOW, 0) or None, WINDOW)


def _phi2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings, partial=True)
    settings.put("qk_layernorm", False)


def _gpt_neox(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_rope(metadata, settings, partial=True)
    metadata.expect("attention.head_count_kv", settings["num_attention_heads"], "is not the number of heads")
    settings.copy("use_parallel_residual", "use_parallel_residual")
    settings.put("attention_bias", metadata.has_tensor("attn_qkv.bias"))


def _stablelm(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    if "head_dim" in settings.values:
        raise metadata.unsupported("attention.key_length", "is not the hidden size divided by the heads")
    put_rope(metadata, settings, partial=True)
    base, length = "rope.freq_base", settings["max_position_embeddings"]
    if metadata.config is None and length > CONTEXT_OF_STABLELM and not metadata.has(base):
        # Converters leave it out. Stable Code 3B, of 16,384 tokens, has another one than the others.
        raise metadata.unsupported(base, f"is missing, and models of {length:,} tokens have one of their own")
    parallel = not metadata.has_tensor("ffn_norm.weight")
    settings.put("use_parallel_residual", parallel)
    metadata.expect("use_parallel_residual", parallel, "contradicts the file's norms")
    settings.put("use_qkv_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("qk_layernorm", metadata.has_tensor("attn_q_norm.weight"))


def _starcoder2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    settings.put("use_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("sliding_window", None)


_EPSILON = "attention.layer_norm_epsilon"
_FALCON: Places = {
    "attn_qkv": ParameterPlace("self_attention.query_key_value", FALCON_QKV),
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_NO_CONTEXT = {"context_length": "the model has no limit; llama.cpp writes a constant"}

BLOOM = Architecture(
    "bloom",
    ("bloom",),
    {
        "block_count": "n_layer",
        "embedding_length": "hidden_size",
        "attention.head_count": "n_head",
        _EPSILON: "layer_norm_epsilon",
    },
    {
        "token_embd": "word_embeddings",
        "token_embd_norm": "word_embeddings_layernorm",
        "output_norm": "ln_f",
        "output": "/lm_head",
    },
    {
        **_FALCON,
        "attn_qkv": ParameterPlace("self_attention.query_key_value", QKV_BY_HEAD),
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    },
    _bloom,
    without_effect={"context_length": "the model has no limit"},
)
FALCON = Architecture(
    "falcon",
    ("falcon",),
    {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "attention.head_count": "num_attention_heads",
        _EPSILON: "layer_norm_epsilon",
    },
    {"token_embd": "word_embeddings", "output_norm": "ln_f", "output": "/lm_head"},
    # The 40B model has a separate norm for the MLP.
    {**_FALCON, "attn_norm": ("input_layernorm", "ln_mlp"), "attn_norm_2": "ln_attn"},
    _falcon,
    without_effect=_NO_CONTEXT,
)
GPT2 = Architecture(
    "gpt2",
    ("gpt2",),
    {
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "attention.head_count": "n_head",
        _EPSILON: "layer_norm_epsilon",
    },
    {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "/lm_head"},
    {
        "attn_norm": "ln_1",
        "attn_qkv.weight": ParameterPlace("attn.c_attn.weight", TRANSPOSED),
        "attn_qkv.bias": "attn.c_attn.bias",
        "attn_output.weight": ParameterPlace("attn.c_proj.weight", TRANSPOSED),
        "attn_output.bias": "attn.c_proj.bias",
        "ffn_norm": "ln_2",
        "ffn_up.weight": ParameterPlace("mlp.c_fc.weight", TRANSPOSED),
        "ffn_up.bias": "mlp.c_fc.bias",
        "ffn_down.weight": ParameterPlace("mlp.c_proj.weight", TRANSPOSED),
        "ffn_down.bias": "mlp.c_proj.bias",
    },
    _gpt2,
)
_MLP: Places = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NEMOTRON = Architecture(
    "nemotron",
    ("nemotron",),
    {**SIZES, _EPSILON: "norm_eps"},
    {**MODEL, "output_norm.weight": ParameterPlace("norm.weight", NORM_PLUS_ONE)},
    {
        **ATTENTION,
        **_MLP,
        "attn_norm.weight": ParameterPlace("input_layernorm.weight", NORM_PLUS_ONE),
        "ffn_norm.weight": ParameterPlace("post_attention_layernorm.weight", NORM_PLUS_ONE),
    },
    _nemotron,
)
PHI2 = Architecture(
    "phi2",
    ("phi",),
    {**SIZES, _EPSILON: "layer_norm_eps"},
    {**MODEL, "output_norm": "final_layernorm"},
    {
        **ATTENTION,
        "attn_output": "self_attn.dense",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
    _phi2,
)
GPT_NEOX = Architecture(
    "gptneox",
    ("gpt_neox",),
    {**SIZES, _EPSILON: "layer_norm_eps"},
    {"token_embd": "embed_in", "output_norm": "final_layer_norm", "output": "/lm_head"},
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": ParameterPlace("attention.query_key_value", QKV_BY_HEAD),
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    _gpt_neox,
)
PHI3 = Architecture(
    "phi3",
    ("phi3",),
    {**SIZES, **RMS_NORM},
    MODEL,
    {
        **ATTENTION,
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    _phi3,
)
STABLELM = Architecture(
    "stablelm",
    ("stablelm",),
    {**SIZES, _EPSILON: "layer_norm_eps"},
    MODEL,
    {
        **ATTENTION,
        **GATED,
        "attn_q_norm.weight": "self_attn.q_layernorm.norms.{row}.weight",
        "attn_k_norm.weight": "self_attn.k_layernorm.norms.{row}.weight",
    },
    _stablelm,
)
STARCODER2 = Architecture(
    "starcoder2",
    ("starcoder2",),
    {**SIZES, _EPSILON: "norm_epsilon"},
    MODEL,
    {**ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    _starcoder2,
)

TABLES = (BLOOM, FALCON, GPT2, GPT_NEOX, NEMOTRON, PHI2, PHI3, STABLELM, STARCODER2)
