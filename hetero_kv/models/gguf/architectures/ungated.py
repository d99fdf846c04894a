"""Models whose feed-forward layers have no gate: Jais 2, MPT, StarCoder.

Sources: `conversion/jais.py`, `mpt.py`, `starcoder.py` and `src/models/` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import ATTENTION, MODEL, SIZES, put_heads_and_rope
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader, same
from hetero_kv.models.gguf.architectures.llama import put_biases

ALIBI, ALIBI_OF_MPT = "attention.max_alibi_bias", 8.0


def _jais2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    put_biases(metadata, settings)


def _mpt(metadata: MetadataReader, settings: ConfigSettings) -> None:
    metadata.expect("feed_forward_length", 4 * settings["d_model"], "is not four times the hidden size")
    metadata.expect("attention.head_count_kv", settings["n_heads"], "is not the number of heads")
    if settings["d_model"] % settings["n_heads"]:
        raise metadata.unsupported("attention.head_count", f"does not divide the hidden size, {settings['d_model']}")
    # Without the key, llama.cpp applies no ALiBi.
    if metadata.scalar(ALIBI, 0.0) != ALIBI_OF_MPT:
        raise metadata.unsupported(ALIBI, f"is not the {ALIBI_OF_MPT} that the model computes with in any case")
    clamp = metadata.scalar("attention.clamp_kqv", 0.0) or None
    require_same_clamp(metadata, clamp)
    settings.put("attn_config", {"alibi": True, "clip_qkv": clamp})


def require_same_clamp(metadata: MetadataReader, clamp: float | None) -> None:
    """Raise ModelError if a configuration's `attn_config` clamps queries, keys and values otherwise than the file."""
    known = getattr(getattr(metadata.config, "attn_config", None), "clip_qkv", None)
    if metadata.config is not None and not same(clamp or 0.0, known or 0.0):
        raise metadata.unsupported("attention.clamp_kqv", f"is not the configuration's clip_qkv, {known}")


def _starcoder(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.put("multi_query", True)
    metadata.expect("attention.head_count_kv", 1, "is not the model's single head of keys and values")
    width = metadata.scalar("feed_forward_length", 4 * settings["n_embd"])
    if width != 4 * settings["n_embd"]:
        settings.put("n_inner", width, "feed_forward_length")


_EPSILON = "attention.layer_norm_epsilon"

JAIS2 = Architecture(
    "jais2",
    ("jais2",),
    {**SIZES, _EPSILON: "layer_norm_eps"},
    MODEL,
    {**ATTENTION, "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    _jais2,
)
MPT = Architecture(
    "mpt",
    ("mpt",),
    {
        "block_count": "n_layers",
        "context_length": "max_seq_len",
        "embedding_length": "d_model",
        "attention.head_count": "n_heads",
        _EPSILON: "layer_norm_epsilon",
    },
    {"token_embd": "wte", "output_norm": "norm_f", "output": "/lm_head"},
    {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
    _mpt,
)
STARCODER = Architecture(
    "starcoder",
    ("gpt_bigcode",),
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
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    _starcoder,
)

TABLES = (JAIS2, MPT, STARCODER)
