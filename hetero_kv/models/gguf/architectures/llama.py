"""Llama and the models whose files are converted as Llama's: rows of queries and keys are reordered.

Facts: `conversion/llama.py`, `granite.py`, `olmo.py`, `mistral3.py` and `src/models/` of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.changes import KEY_ROWS, QUERY_ROWS
from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    GATED,
    MODEL,
    RMS_NORM,
    ROUTER,
    SIZES,
    put_experts,
    put_heads,
    put_heads_as_rotated,
)
from hetero_kv.models.gguf.architectures.declaration import Architecture, Place, Places, Said, Settings
from hetero_kv.models.gguf.architectures.rotation import put_rotation
from hetero_kv.models.gguf.architectures.windows import WINDOW

REORDERED: Places = {
    **ATTENTION,
    "attn_q": Place("self_attn.q_proj", QUERY_ROWS),
    "attn_k": Place("self_attn.k_proj", KEY_ROWS),
}


def put_biases(said: Said, settings: Settings) -> None:
    """Put whether matrices have biases, which only a file's tensors say."""
    settings.put("attention_bias", said.has_tensor("attn_q.bias"))
    settings.put("mlp_bias", said.has_tensor("ffn_down.bias"))


def _llama(said: Said, settings: Settings) -> None:
    put_heads_as_rotated(said, settings)
    put_rotation(said, settings)
    window = said.one(WINDOW, 0)
    if said.one("expert_count", 0):
        settings.values["model_type"] = "mixtral"
        put_experts(said, settings, "num_local_experts", width=None)
    else:
        said.only("expert_used_count", 0, "chooses among experts, of which there are none")
        settings.values["model_type"] = "mistral" if window else "llama"
        put_biases(said, settings)
    if window:
        # No converter writes it, and llama.cpp computes without; the model has it.
        settings.put("sliding_window", window, WINDOW)


def _smollm3(said: Said, settings: Settings) -> None:
    put_heads(said, settings, head_dim=False)
    put_rotation(said, settings)
    settings.put("attention_bias", said.has_tensor("attn_q.bias"))
    settings.put("mlp_bias", said.has_tensor("ffn_down.bias"))
    settings.put("use_sliding_window", False)
    # In no file: every fourth layer does not rotate, in llama.cpp as in the model.
    settings.put("no_rope_layer_interval", 4)


def _arcee(said: Said, settings: Settings) -> None:
    put_heads_as_rotated(said, settings)
    put_rotation(said, settings)
    put_biases(said, settings)


def _granite(said: Said, settings: Settings) -> None:
    put_heads(said, settings, head_dim=False)
    put_rotation(said, settings)
    settings.put("attention_bias", said.has_tensor("attn_q.bias"))
    # With False llama.cpp rotates nothing.
    said.only("rope.scaling.finetuned", True, "means positions that are not rotated")
    settings.put("attention_multiplier", said.one("attention.scale", 0.0) or 0.0, "attention.scale")
    if not settings["attention_multiplier"]:
        dim = settings["hidden_size"] // settings["num_attention_heads"]
        settings.put("attention_multiplier", dim**-0.5, "attention.scale")
    settings.put("embedding_multiplier", said.one("embedding_scale", 0.0) or 1.0, "embedding_scale")
    settings.put("residual_multiplier", said.one("residual_scale", 0.0) or 1.0, "residual_scale")
    settings.put("logits_scaling", said.one("logit_scale", 0.0) or 1.0, "logit_scale")


def _granite_dense(said: Said, settings: Settings) -> None:
    _granite(said, settings)
    settings.put("mlp_bias", said.has_tensor("ffn_down.bias"))


def _granite_mixture(said: Said, settings: Settings) -> None:
    _granite(said, settings)
    put_experts(said, settings, "num_local_experts", width=None)


def _mistral3(said: Said, settings: Settings) -> None:
    put_heads_as_rotated(said, settings)
    multiplier = said.one("rope.scaling.yarn_log_multiplier", 0.0)
    put_rotation(said, settings, yarn=("yarn_log_multiplier",))
    beta = said.one("attention.temperature_scale", 0.0)
    rope = settings["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope |= {"llama_4_scaling_beta": beta}
        if multiplier:
            rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
        settings.said["rope_parameters"][1].update(
            {name: rope[name] for name in ("llama_4_scaling_beta", "mscale_all_dim") if name in rope}
        )
    elif beta or multiplier:
        raise said.refused("attention.temperature_scale", "scales by position without YaRN")
    else:
        settings.values["model_type"] = "mistral"
        settings.put("sliding_window", None)


def _olmo(said: Said, settings: Settings) -> None:
    put_heads(said, settings, head_dim=False)
    put_rotation(said, settings)
    said.only("attention.layer_norm_epsilon", 1e-5, "is not the 0.00001 of the model's norms")
    settings.put("clip_qkv", said.one("attention.clamp_kqv", 0.0) or None, "attention.clamp_kqv")


_KEYS = {**SIZES, **RMS_NORM}

_LAYOUT = {"tensor_data_layout": "says by whom the rows were reordered, which all of them are"}

LLAMA = Architecture(
    "llama",
    ("llama", "mixtral", "mistral", "ministral"),
    _KEYS,
    MODEL,
    {**REORDERED, **GATED, **ROUTER},
    _llama,
    without_effect=_LAYOUT,
)
MISTRAL3 = Architecture("mistral3", ("ministral3", "mistral"), _KEYS, MODEL, {**REORDERED, **GATED}, _mistral3)
SMOLLM3 = Architecture("smollm3", ("smollm3",), _KEYS, MODEL, {**REORDERED, **GATED}, _smollm3)
ARCEE = Architecture(
    "arcee", ("arcee",), _KEYS, MODEL, {**REORDERED, "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}, _arcee
)
GRANITE = Architecture("granite", ("granite",), _KEYS, MODEL, {**REORDERED, **GATED}, _granite_dense)
GRANITE_MOE = Architecture(
    "granitemoe",
    ("granitemoe",),
    _KEYS,
    MODEL,
    {**REORDERED, "ffn_gate_inp": "block_sparse_moe.router"},
    _granite_mixture,
)
OLMO = Architecture("olmo", ("olmo",), SIZES, MODEL, {**REORDERED, **GATED}, _olmo)

TABLES = (LLAMA, MISTRAL3, SMOLLM3, ARCEE, GRANITE, GRANITE_MOE, OLMO)
