"""Gemma 1 to 3: norms are stored plus one. Facts: `conversion/gemma.py` and `src/models/gemma*.cpp` of
https://github.com/ggml-org/llama.cpp."""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.changes import NORM_PLUS_ONE
from hetero_kv.models.gguf.architectures.common import ATTENTION, GATED, MODEL, RMS_NORM, SIZES, put_heads, put_usual
from hetero_kv.models.gguf.architectures.declaration import Architecture, Place, Places, Said, Settings
from hetero_kv.models.gguf.architectures.rotation import DEFAULT_BASE, put_rotation
from hetero_kv.models.gguf.architectures.windows import put_windows

#: Of the models of 27 billion parameters, whose queries are scaled by the width over the heads; no key says it.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _norm(path: str) -> Place:
    return Place(path, NORM_PLUS_ONE)


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


def _query_scale(said: Said, settings: Settings) -> None:
    name = said.architecture.name
    of_width = settings["num_hidden_layers"] == LAYERS_OF_27B[name]
    scalar = settings["hidden_size"] // settings["num_attention_heads"] if of_width else settings["head_dim"]
    settings.put("query_pre_attn_scalar", scalar)


def _soft_cap(said: Said, settings: Settings, key: str, name: str, default: float | None) -> None:
    settings.put(name, said.one(key, default) or None, key)


def _gemma2(said: Said, settings: Settings) -> None:
    put_usual(said, settings)
    _query_scale(said, settings)
    # The values that llama.cpp takes where a file has none.
    _soft_cap(said, settings, "attn_logit_softcapping", "attn_logit_softcapping", 50.0)
    _soft_cap(said, settings, "final_logit_softcapping", "final_logit_softcapping", 30.0)
    put_windows(said, settings, usual=2, default=4096)


def _gemma3(said: Said, settings: Settings) -> None:
    put_heads(said, settings)
    _query_scale(said, settings)
    _soft_cap(said, settings, "final_logit_softcapping", "final_logit_softcapping", None)
    settings.put("attn_logit_softcapping", None)
    put_windows(said, settings, usual=6, may_be_none=True)
    if settings["sliding_window"] is None:
        # The class makes a mask of its window even where no layer has one.
        del settings.values["sliding_window"]
    put_rotation(said, settings)
    full, spoken = settings["rope_parameters"], settings.said["rope_parameters"][1]
    base = "rope.freq_base_swa"
    window = {"rope_type": "default", "rope_theta": float(said.one(base, DEFAULT_BASE))}
    settings.values["rope_parameters"] = {"full_attention": full, "sliding_attention": window}
    settings.said["rope_parameters"] = (
        said.key("rope.*"),
        {
            "full_attention": spoken,
            "sliding_attention": {"rope_theta": window["rope_theta"]} if said.has(base) else {},
        },
    )


_KEYS = {**SIZES, **RMS_NORM}
_HEADS: Places = {"attn_q_norm": _norm("self_attn.q_norm"), "attn_k_norm": _norm("self_attn.k_norm")}

TABLES = (
    Architecture("gemma", ("gemma",), _KEYS, _MODEL, _LAYER, put_usual),
    Architecture("gemma2", ("gemma2",), _KEYS, _MODEL, _SANDWICHED, _gemma2),
    Architecture("gemma3", ("gemma3_text",), _KEYS, _MODEL, {**_SANDWICHED, **_HEADS}, _gemma3),
)
