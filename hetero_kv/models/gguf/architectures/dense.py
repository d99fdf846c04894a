"""Dense models of recent years: Apertus, OLMo 2 and 3, Command R, GLM 4, Seed-OSS, EXAONE 4, ERNIE 4.5, Hunyuan.

Sources: their files in `conversion/` and `src/models/` of https://github.com/ggml-org/llama.cpp.
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
    put_heads_and_rope,
    put_layers_without_predictors,
)
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader, Places
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import PATTERN, WINDOW, put_rope_by_window, put_windows

#: The number of layers of EXAONE 4 32B, the only EXAONE 4 with windows in files that do not name their layers.
LAYERS_OF_EXAONE_32B = 64


def _olmo2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    if not metadata.scalar(WINDOW, 0):
        return
    settings.values["model_type"] = "olmo3"
    put_windows(metadata, settings, usual=4)
    put_rope_by_window(metadata, settings)


def _cohere(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    settings.put("logit_scale", metadata.scalar("logit_scale", 0.0) or 1.0, "logit_scale")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    # Files give the tokenizer's limit, if it has one.
    settings.from_file.pop("max_position_embeddings", None)


def _command_r(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _cohere(metadata, settings)
    settings.put("use_qk_norm", metadata.has_tensor("attn_q_norm.weight"))


def _cohere2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _cohere(metadata, settings)
    metadata.require("logit_scale", "logit_scale")
    put_windows(metadata, settings, usual=4)
    metadata.expect("rope.freq_base_swa", settings["rope_parameters"]["rope_theta"], "is not that of the other layers")


def _glm(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_rope(metadata, settings, partial=True)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


def _apertus(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    settings.put("hidden_act", "xielu")
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


def _seed_oss(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("attention_out_bias", metadata.has_tensor("attn_output.bias"))
    settings.put("mlp_bias", metadata.has_tensor("ffn_down.bias"))


def _exaone4(metadata: MetadataReader, settings: ConfigSettings) -> None:
    # EXAONE 4.5 has one that predicts.
    put_layers_without_predictors(metadata, settings)
    put_heads_and_rope(metadata, settings)
    if settings["num_hidden_layers"] == LAYERS_OF_EXAONE_32B:
        put_windows(metadata, settings, usual=4, default=4096)
    else:
        put_windows(metadata, settings, usual=1, may_be_none=True)
        if not metadata.has(PATTERN):
            # Without windows all layers apply RoPE; with windows, only the windowed layers do.
            settings.values["sliding_window"] = None
    metadata.expect("rope.freq_base_swa", settings["rope_parameters"]["rope_theta"], "is not that of the other layers")


def _ernie(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    settings.put("use_bias", metadata.has_tensor("attn_q.bias"))


def _hunyuan(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_and_rope(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))


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
#: Attention and MLP read the same norm.
_PARALLEL: Places = {**_WITHOUT_NORMS, **NORMED_HEADS, **GATED, "attn_norm": "input_layernorm"}
_MERGED: Places = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}

TABLES = (
    Architecture(
        "apertus",
        ("apertus",),
        _KEYS,
        MODEL,
        {
            **_WITHOUT_NORMS,
            **NORMED_HEADS,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _apertus,
        scalars={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")},
    ),
    Architecture("chatglm", ("glm",), _KEYS, MODEL, {**ATTENTION, **_MERGED}, _glm),
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
    Architecture("exaone4", ("exaone4",), _KEYS, MODEL, _NORMED_AFTER, _exaone4, predicts=True),
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
