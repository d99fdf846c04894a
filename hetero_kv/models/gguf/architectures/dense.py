"""Dense models of recent years: OLMo 2 and 3, Command R, GLM 4, Seed-OSS, EXAONE 4, ERNIE 4.5, Hunyuan.

Facts: their files in `conversion/` and `src/models/` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    GATED,
    MODEL,
    NORMED_HEADS,
    RMS_NORM,
    SIZES,
    put_heads,
    put_usual,
)
from hetero_kv.models.gguf.architectures.declaration import Architecture, Places, Said, Settings
from hetero_kv.models.gguf.architectures.rotation import put_rotation
from hetero_kv.models.gguf.architectures.windows import PATTERN, WINDOW, put_windows

#: Of the only EXAONE 4 with windows where its file does not say which layers have them.
LAYERS_OF_EXAONE_32B = 64


def _olmo2(said: Said, settings: Settings) -> None:
    put_heads(said, settings, head_dim=False)
    put_rotation(said, settings)
    settings.put("attention_bias", said.has_tensor("attn_q.bias"))
    if not said.one(WINDOW, 0):
        return
    settings.values["model_type"] = "olmo3"
    put_windows(said, settings, usual=4)
    full, spoken = settings["rope_parameters"], settings.said["rope_parameters"][1]
    base = float(said.one("rope.freq_base_swa", full["rope_theta"]))
    settings.values["rope_parameters"] = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": base},
    }
    settings.said["rope_parameters"] = (said.key("rope.*"), {"full_attention": spoken})


def _cohere(said: Said, settings: Settings) -> None:
    put_usual(said, settings)
    settings.put("logit_scale", said.one("logit_scale", 0.0) or 1.0, "logit_scale")
    settings.put("attention_bias", said.has_tensor("attn_q.bias"))
    # The length that the tokenizer says, where it does.
    settings.said.pop("max_position_embeddings", None)


def _command_r(said: Said, settings: Settings) -> None:
    _cohere(said, settings)
    settings.put("use_qk_norm", said.has_tensor("attn_q_norm.weight"))


def _cohere2(said: Said, settings: Settings) -> None:
    _cohere(said, settings)
    said.require("logit_scale", "logit_scale")
    put_windows(said, settings, usual=4)
    said.only("rope.freq_base_swa", settings["rope_parameters"]["rope_theta"], "is not that of the other layers")


def _glm(said: Said, settings: Settings) -> None:
    put_heads(said, settings)
    put_rotation(said, settings, partial=True)
    settings.put("attention_bias", said.has_tensor("attn_q.bias"))


def _seed_oss(said: Said, settings: Settings) -> None:
    put_usual(said, settings)
    settings.put("attention_bias", said.has_tensor("attn_q.bias"))
    settings.put("attention_out_bias", said.has_tensor("attn_output.bias"))
    settings.put("mlp_bias", said.has_tensor("ffn_down.bias"))


def _exaone4(said: Said, settings: Settings) -> None:
    put_usual(said, settings)
    if settings["num_hidden_layers"] == LAYERS_OF_EXAONE_32B:
        put_windows(said, settings, usual=4, default=4096)
    else:
        put_windows(said, settings, usual=1, may_be_none=True)
        if not said.has(PATTERN):
            # Layers without a window are not rotated where there is one at all.
            settings.values["sliding_window"] = None
    said.only("rope.freq_base_swa", settings["rope_parameters"]["rope_theta"], "is not that of the other layers")


def _ernie(said: Said, settings: Settings) -> None:
    put_usual(said, settings)
    settings.put("use_bias", said.has_tensor("attn_q.bias"))


def _hunyuan(said: Said, settings: Settings) -> None:
    put_usual(said, settings)
    settings.put("attention_bias", said.has_tensor("attn_q.bias"))


_KEYS = {**SIZES, **RMS_NORM}
_LAYER_NORM = {**SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"}
_WITHOUT_NORMS = {name: place for name, place in ATTENTION.items() if not name.endswith("norm")}
_NORMED_AFTER: Places = {
    **_WITHOUT_NORMS,
    **NORMED_HEADS,
    **GATED,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Attention and the feed-forward part read the same norm.
_PARALLEL: Places = {**_WITHOUT_NORMS, **NORMED_HEADS, **GATED, "attn_norm": "input_layernorm"}
_MERGED: Places = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}

TABLES = (
    Architecture("olmo2", ("olmo2", "olmo3"), _KEYS, MODEL, _NORMED_AFTER, _olmo2),
    Architecture("command-r", ("cohere",), _LAYER_NORM, MODEL, _PARALLEL, _command_r),
    Architecture("cohere2", ("cohere2",), _LAYER_NORM, MODEL, _PARALLEL, _cohere2),
    Architecture(
        "glm4",
        ("glm4",),
        _KEYS,
        MODEL,
        {
            **ATTENTION,
            **_MERGED,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        _glm,
    ),
    Architecture(
        "seed_oss",
        ("seed_oss",),
        _KEYS,
        MODEL,
        {
            **_WITHOUT_NORMS,
            **GATED,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        },
        _seed_oss,
    ),
    Architecture("exaone4", ("exaone4",), _KEYS, MODEL, _NORMED_AFTER, _exaone4),
    Architecture("ernie4_5", ("ernie4_5",), _KEYS, MODEL, {**ATTENTION, **GATED}, _ernie),
    Architecture(
        "hunyuan-dense",
        ("hunyuan_v1_dense",),
        _KEYS,
        MODEL,
        {
            **ATTENTION,
            **GATED,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        _hunyuan,
    ),
)
