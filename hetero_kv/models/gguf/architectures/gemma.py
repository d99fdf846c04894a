"""Gemma 1 to 3, whose files store norms plus one.

Sources: `conversion/gemma.py` and `src/models/gemma*.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    GATED,
    MODEL,
    RMS_NORM,
    SIZES,
    put_heads,
    put_heads_and_rope,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import NORM_PLUS_ONE
from hetero_kv.models.gguf.architectures.rope import DEFAULT_BASE, put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import put_windows

#: The number of layers of the 27B models, which scale queries by the hidden size divided by the heads; no key tells.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _norm(path: str) -> ParameterPlace:
    return ParameterPlace(path, NORM_PLUS_ONE)


_MODEL: Places = {**MODEL, "output_norm": _norm("norm")}
_LAYER: Places = {
    **ATTENTION,
    **GATED,
    "attn_norm": _norm("input_layernorm"),
    "ffn_norm": _norm("post_attention_layernorm"),
}
_SANDWICHED: Places = {
    **_LAYER,
    "post_attention_norm": _norm("post_attention_layernorm"),
    "ffn_norm": _norm("pre_feedforward_layernorm"),
    "post_ffw_norm": _norm("post_feedforward_layernorm"),
}


def _query_scale(metadata: MetadataReader, settings: ConfigSettings) -> None:
    name = metadata.architecture.name
    of_width = settings["num_hidden_layers"] == LAYERS_OF_27B[name]
    scalar = settings["hidden_size"] // settings["num_attention_heads"] if of_width else settings["head_dim"]
    settings.put("query_pre_attn_scalar", scalar)


def _soft_cap(metadata: MetadataReader, settings: ConfigSettings, key: str, name: str, default: float | None) -> None:
    settings.put(name, metadata.scalar(key, default) or None, key)


def _gemma2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    _query_scale(metadata, settings)
    # llama.cpp's defaults.
    _soft_cap(metadata, settings, "attn_logit_softcapping", "attn_logit_softcapping", 50.0)
    _soft_cap(metadata, settings, "final_logit_softcapping", "final_logit_softcapping", 30.0)
    put_windows(metadata, settings, usual=2, default=4096)


def put_rope_of_windows(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Set the rotation of full attention, and that of sliding windows, which has another base."""
    put_rope(metadata, settings)
    full, stated = settings["rope_parameters"], settings.from_file["rope_parameters"][1]
    base = "rope.freq_base_swa"
    window = {"rope_type": "default", "rope_theta": float(metadata.scalar(base, DEFAULT_BASE))}
    settings.values["rope_parameters"] = {"full_attention": full, "sliding_attention": window}
    settings.from_file["rope_parameters"] = (
        metadata.key("rope.*"),
        {
            "full_attention": stated,
            "sliding_attention": {"rope_theta": window["rope_theta"]} if metadata.has(base) else {},
        },
    )


def _gemma3(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    _query_scale(metadata, settings)
    _soft_cap(metadata, settings, "final_logit_softcapping", "final_logit_softcapping", None)
    settings.put("attn_logit_softcapping", None)
    put_windows(metadata, settings, usual=6, may_be_none=True)
    if settings["sliding_window"] is None:
        # The class builds a mask for its window even if no layer has one, so its default stays.
        del settings.values["sliding_window"]
    put_rope_of_windows(metadata, settings)


_KEYS = {**SIZES, **RMS_NORM}
_HEADS: Places = {"attn_q_norm": _norm("self_attn.q_norm"), "attn_k_norm": _norm("self_attn.k_norm")}

TABLES = (
    Architecture("gemma", ("gemma",), _KEYS, _MODEL, _LAYER, put_heads_and_rope),
    Architecture("gemma2", ("gemma2",), _KEYS, _MODEL, _SANDWICHED, _gemma2),
    Architecture("gemma3", ("gemma3_text",), _KEYS, _MODEL, {**_SANDWICHED, **_HEADS}, _gemma3),
)
