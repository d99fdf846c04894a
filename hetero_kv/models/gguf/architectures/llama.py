"""Llama, and models that are converted like it: the rows of queries and keys are reordered.

Sources: `conversion/llama.py`, `granite.py`, `olmo.py`, `mistral3.py` and `src/models/` of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    GATED,
    MODEL,
    RMS_NORM,
    ROUTER,
    SIZES,
    put_experts,
    put_heads,
    put_heads_by_rope_dimension,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import (
    KEY_ROWS,
    QUERY_ROWS,
    SHARED_GATE_ROWS,
    SHARED_UP_ROWS,
)
from hetero_kv.models.gguf.architectures.rope import head_dim_of, put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import WINDOW

REORDERED: Places = {
    **ATTENTION,
    "attn_q": ParameterPlace("self_attn.q_proj", QUERY_ROWS),
    "attn_k": ParameterPlace("self_attn.k_proj", KEY_ROWS),
}


def put_biases(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put whether matrices have biases, which only a file's tensors show."""
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("mlp_bias", metadata.has_tensor("ffn_down.bias"))


def _llama(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_by_rope_dimension(metadata, settings)
    put_rope(metadata, settings)
    window = metadata.scalar(WINDOW, 0)
    if metadata.scalar("expert_count", 0):
        settings.values["model_type"] = "mixtral"
        put_experts(metadata, settings, "num_local_experts", width=None)
    else:
        metadata.expect("expert_used_count", 0, "chooses experts, and the file has none")
        settings.values["model_type"] = "mistral" if window else "llama"
        put_biases(metadata, settings)
    if window:
        # No converter writes the window, and llama.cpp ignores it; the model uses it.
        settings.put("sliding_window", window, WINDOW)


def _as_llama(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Of models that compute what Llama computes, up to their activation."""
    put_heads_by_rope_dimension(metadata, settings)
    put_rope(metadata, settings)
    put_biases(metadata, settings)


def _exaone(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _as_llama(metadata, settings)
    # Newer converters copy the configuration's `layer_norm_epsilon` under its own name; the norms are RMS norms.
    of_layer = "attention.layer_norm_epsilon"
    of_rms = RMS if metadata.has(RMS) or not metadata.has(of_layer) else of_layer
    settings.copy("rms_norm_eps", of_rms)
    metadata.expect(of_layer, settings["rms_norm_eps"], f"differs from {RMS}")


def _minicpm(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    for suffix in ("embedding_scale", "residual_scale", "logit_scale"):
        if not metadata.scalar(suffix, 0.0):
            raise metadata.unsupported(suffix, "is missing, and models of MiniCPM differ in it")
    put_granite_scales(metadata, settings)
    put_biases(metadata, settings)


def _smollm3(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("mlp_bias", metadata.has_tensor("ffn_down.bias"))
    settings.put("use_sliding_window", False)
    # No key states it: every fourth layer has no RoPE, in llama.cpp as in the model.
    settings.put("no_rope_layer_interval", 4)


def _granite(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    # With False, llama.cpp applies no RoPE.
    metadata.expect("rope.scaling.finetuned", True, "means a model without RoPE")
    put_granite_scales(metadata, settings)


RMS = "attention.layer_norm_rms_epsilon"
SHARED_WIDTH = "expert_shared_feed_forward_length"
#: The factors of Granite's models, which all their files have.
GRANITE_SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")


def put_granite_scales(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put the factors of attention, embeddings, residuals and logits."""
    settings.put("attention_multiplier", metadata.scalar("attention.scale", 0.0) or 0.0, "attention.scale")
    if not settings["attention_multiplier"]:
        settings.put("attention_multiplier", head_dim_of(settings) ** -0.5, "attention.scale")
    settings.put("embedding_multiplier", metadata.scalar("embedding_scale", 0.0) or 1.0, "embedding_scale")
    settings.put("residual_multiplier", metadata.scalar("residual_scale", 0.0) or 1.0, "residual_scale")
    settings.put("logits_scaling", metadata.scalar("logit_scale", 0.0) or 1.0, "logit_scale")


def _granite_dense(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _granite(metadata, settings)
    settings.put("mlp_bias", metadata.has_tensor("ffn_down.bias"))


def _granite_mixture(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _granite(metadata, settings)
    put_experts(metadata, settings, "num_local_experts", width=None)
    if metadata.scalar(SHARED_WIDTH, 0):
        settings.values["model_type"] = "granitemoeshared"
        settings.put("shared_intermediate_size", metadata.scalar(SHARED_WIDTH), SHARED_WIDTH)


def _mistral3(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads_by_rope_dimension(metadata, settings)
    multiplier = metadata.scalar("rope.scaling.yarn_log_multiplier", 0.0)
    put_rope(metadata, settings, yarn=("yarn_log_multiplier",))
    beta = metadata.scalar("attention.temperature_scale", 0.0)
    rope = settings["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope |= {"llama_4_scaling_beta": beta}
        if multiplier:
            rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
        settings.from_file["rope_parameters"][1].update(
            {name: rope[name] for name in ("llama_4_scaling_beta", "mscale_all_dim") if name in rope}
        )
    elif beta or multiplier:
        raise metadata.unsupported("attention.temperature_scale", "scales attention by position without YaRN")
    else:
        settings.values["model_type"] = "mistral"
        settings.put("sliding_window", None)


def _olmo(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    metadata.expect("attention.layer_norm_epsilon", 1e-5, "is not the model's 0.00001")
    settings.put("clip_qkv", metadata.scalar("attention.clamp_kqv", 0.0) or None, "attention.clamp_kqv")


_KEYS = {**SIZES, **RMS_NORM}

_LAYOUT = {"tensor_data_layout": "names who reordered the rows; they are reordered in any case"}

LLAMA = Architecture(
    "llama",
    ("llama", "mixtral", "mistral", "ministral", "internlm3"),
    _KEYS,
    MODEL,
    {**REORDERED, **GATED, **ROUTER},
    _llama,
    without_effect=_LAYOUT,
)
MISTRAL3 = Architecture("mistral3", ("ministral3", "mistral"), _KEYS, MODEL, {**REORDERED, **GATED}, _mistral3)
SMOLLM3 = Architecture("smollm3", ("smollm3",), _KEYS, MODEL, {**REORDERED, **GATED}, _smollm3)
ARCEE = Architecture(
    "arcee", ("arcee",), _KEYS, MODEL, {**REORDERED, "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}, _as_llama
)
GRANITE = Architecture("granite", ("granite",), _KEYS, MODEL, {**REORDERED, **GATED}, _granite_dense)
GRANITE_MOE = Architecture(
    "granitemoe",
    ("granitemoe", "granitemoeshared"),
    _KEYS,
    MODEL,
    {
        **REORDERED,
        "ffn_gate_inp": "block_sparse_moe.router",
        "ffn_gate_shexp": ParameterPlace("shared_mlp.input_linear", part=SHARED_GATE_ROWS),
        "ffn_up_shexp": ParameterPlace("shared_mlp.input_linear", part=SHARED_UP_ROWS),
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    _granite_mixture,
)
OLMO = Architecture("olmo", ("olmo",), SIZES, MODEL, {**REORDERED, **GATED}, _olmo)

INTERNLM2 = Architecture("internlm2", ("llama",), _KEYS, MODEL, {**REORDERED, **GATED}, _as_llama)
XVERSE = Architecture("xverse", ("llama",), _KEYS, MODEL, {**REORDERED, **GATED}, _as_llama, without_effect=_LAYOUT)
EXAONE = Architecture("exaone", ("llama",), SIZES, MODEL, {**ATTENTION, **GATED}, _exaone)
MINICPM = Architecture("minicpm", ("granite",), _KEYS, MODEL, {**REORDERED, **GATED}, _minicpm)

TABLES = (INTERNLM2, XVERSE, EXAONE, MINICPM, LLAMA, MISTRAL3, SMOLLM3, ARCEE, GRANITE, GRANITE_MOE, OLMO)
