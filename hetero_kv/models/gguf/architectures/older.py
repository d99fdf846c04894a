"""Models of the first years: Bloom, Falcon, GPT-2, GPT-NeoX, Nemotron, Phi 2 and 3, StableLM, StarCoder 2.

Facts: their files in `conversion/` and `src/models/` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.changes import FALCON_QKV, NORM_PLUS_ONE, QKV_BY_HEAD, TRANSPOSED
from hetero_kv.models.gguf.architectures.common import ATTENTION, GATED, MODEL, RMS_NORM, SIZES, put_heads
from hetero_kv.models.gguf.architectures.declaration import Architecture, Place, Places, Said, Settings
from hetero_kv.models.gguf.architectures.rotation import put_rotation
from hetero_kv.models.gguf.architectures.windows import WINDOW

_FOUR_TIMES = "is not four times the model's width"


def _four_times_as_wide(said: Said, settings: Settings, width: str) -> None:
    said.only("feed_forward_length", 4 * settings[width], _FOUR_TIMES)


def _bloom(said: Said, settings: Settings) -> None:
    _four_times_as_wide(said, settings, "hidden_size")
    said.only("attention.head_count_kv", settings["n_head"], "is not the number of heads")


def _falcon(said: Said, settings: Settings) -> None:
    heads = settings["num_attention_heads"]
    groups = said.one("attention.head_count_kv", heads)
    two_norms = said.has_tensor("attn_norm_2.weight")
    settings.put("new_decoder_architecture", two_norms or 1 < groups < heads)
    settings.put("multi_query", groups == 1)
    settings.put("num_kv_heads", groups, "attention.head_count_kv")
    settings.put("num_ln_in_parallel_attn", 2 if two_norms else 1)
    settings.put("parallel_attn", True)
    settings.put("alibi", False)
    settings.put("bias", said.has_tensor("attn_qkv.bias"))
    settings.put("ffn_hidden_size", said.one("feed_forward_length", 4 * settings["hidden_size"]), "feed_forward_length")
    said.only("tensor_data_layout", "jploski", "is an order of queries, keys and values that is not known")
    put_rotation(said, settings)


def _gpt2(said: Said, settings: Settings) -> None:
    width = said.one("feed_forward_length", 4 * settings["n_embd"])
    if width != 4 * settings["n_embd"]:
        settings.put("n_inner", width, "feed_forward_length")
    said.only("attention.head_count_kv", settings["n_head"], "is not the number of heads")


def _nemotron(said: Said, settings: Settings) -> None:
    put_heads(said, settings)
    put_rotation(said, settings, partial=True)
    said.only("attention.layer_norm_rms_epsilon", settings["norm_eps"], "is not that of the model's norms")


def _phi3(said: Said, settings: Settings) -> None:
    put_heads(said, settings, head_dim=False)
    put_rotation(said, settings, partial=True)
    rope = settings["rope_parameters"]
    settings.put("original_max_position_embeddings", rope.get("original_max_position_embeddings", 4096))
    # llama.cpp reads the window and computes without it; the model has it.
    settings.put("sliding_window", said.one(WINDOW, 0) or None, WINDOW)


def _phi2(said: Said, settings: Settings) -> None:
    put_heads(said, settings, head_dim=False)
    put_rotation(said, settings, partial=True)
    settings.put("qk_layernorm", False)


def _gpt_neox(said: Said, settings: Settings) -> None:
    put_rotation(said, settings, partial=True)
    said.only("attention.head_count_kv", settings["num_attention_heads"], "is not the number of heads")
    settings.copy("use_parallel_residual", "use_parallel_residual")
    settings.put("attention_bias", said.has_tensor("attn_qkv.bias"))


def _stablelm(said: Said, settings: Settings) -> None:
    put_heads(said, settings, head_dim=False)
    put_rotation(said, settings, partial=True)
    parallel = not said.has_tensor("ffn_norm.weight")
    settings.put("use_parallel_residual", parallel)
    said.only("use_parallel_residual", parallel, "is not what its norms say")
    settings.put("use_qkv_bias", said.has_tensor("attn_q.bias"))
    settings.put("qk_layernorm", said.has_tensor("attn_q_norm.weight"))


def _starcoder2(said: Said, settings: Settings) -> None:
    put_heads(said, settings, head_dim=False)
    put_rotation(said, settings)
    settings.put("use_bias", said.has_tensor("attn_q.bias"))
    settings.put("sliding_window", None)


_EPSILON = "attention.layer_norm_epsilon"
_FALCON: Places = {
    "attn_qkv": Place("self_attention.query_key_value", FALCON_QKV),
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_NO_CONTEXT = {"context_length": "the model is of no length; llama.cpp gives all of them the same"}

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
        "attn_qkv": Place("self_attention.query_key_value", QKV_BY_HEAD),
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    },
    _bloom,
    without_effect={"context_length": "the model is of no length"},
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
    # The model of 40 billion parameters has a norm of its own for the feed-forward part.
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
        "attn_qkv.weight": Place("attn.c_attn.weight", TRANSPOSED),
        "attn_qkv.bias": "attn.c_attn.bias",
        "attn_output.weight": Place("attn.c_proj.weight", TRANSPOSED),
        "attn_output.bias": "attn.c_proj.bias",
        "ffn_norm": "ln_2",
        "ffn_up.weight": Place("mlp.c_fc.weight", TRANSPOSED),
        "ffn_up.bias": "mlp.c_fc.bias",
        "ffn_down.weight": Place("mlp.c_proj.weight", TRANSPOSED),
        "ffn_down.bias": "mlp.c_proj.bias",
    },
    _gpt2,
)
_MLP: Places = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NEMOTRON = Architecture(
    "nemotron",
    ("nemotron",),
    {**SIZES, _EPSILON: "norm_eps"},
    {**MODEL, "output_norm.weight": Place("norm.weight", NORM_PLUS_ONE)},
    {
        **ATTENTION,
        **_MLP,
        "attn_norm.weight": Place("input_layernorm.weight", NORM_PLUS_ONE),
        "ffn_norm.weight": Place("post_attention_layernorm.weight", NORM_PLUS_ONE),
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
        "attn_qkv": Place("attention.query_key_value", QKV_BY_HEAD),
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
