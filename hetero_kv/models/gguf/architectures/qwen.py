"""Qwen 2 and 3, their mixtures of experts, and the text models of Qwen-VL, which compute the same of a text.

Sources: `conversion/qwen.py`, `qwenvl.py` and `qwen3vl.py` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from functools import partial

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    GATED,
    MODEL,
    NORMED_HEADS,
    RMS_NORM,
    ROUTER,
    SIZES,
    put_experts,
    put_heads,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import ONE_ROW
from hetero_kv.models.gguf.architectures.rope import put_rope


def _qwen2(metadata: MetadataReader, settings: ConfigSettings, *, axes: bool = False) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings, axes=axes)
    settings.put("use_sliding_window", False)


def _qwen3(metadata: MetadataReader, settings: ConfigSettings, *, axes: bool = False) -> None:
    put_heads(metadata, settings)
    put_rope(metadata, settings, axes=axes)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("use_sliding_window", False)


def _mixture(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_experts(metadata, settings, "num_experts")
    settings.put("decoder_sparse_step", 1)
    settings.put("mlp_only_layers", [])
    settings.put("use_sliding_window", False)


def _qwen2_moe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    _mixture(metadata, settings)
    settings.copy("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
    # llama.cpp does not normalise the weights of chosen experts.
    settings.put("norm_topk_prob", False)


def _qwen3_moe(metadata: MetadataReader, settings: ConfigSettings, *, axes: bool = False) -> None:
    put_heads(metadata, settings)
    put_rope(metadata, settings, axes=axes)
    _mixture(metadata, settings)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("norm_topk_prob", True)


_KEYS = {**SIZES, **RMS_NORM}
SHARED_EXPERT: Places = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": ParameterPlace("mlp.shared_expert_gate", ONE_ROW),
}

_DEEPSTACK = {"n_deepstack_layers": "these add parts of images, and a text has none"}

TABLES = (
    Architecture("qwen2", ("qwen2",), _KEYS, MODEL, {**ATTENTION, **GATED}, _qwen2),
    Architecture("qwen3", ("qwen3",), _KEYS, MODEL, {**ATTENTION, **NORMED_HEADS, **GATED}, _qwen3),
    Architecture(
        "qwen2moe",
        ("qwen2_moe",),
        _KEYS,
        MODEL,
        {**ATTENTION, **ROUTER, **SHARED_EXPERT},
        _qwen2_moe,
        optional=frozenset({"feed_forward_length"}),
    ),
    Architecture(
        "qwen3moe",
        ("qwen3_moe",),
        _KEYS,
        MODEL,
        {**ATTENTION, **NORMED_HEADS, **ROUTER},
        _qwen3_moe,
        optional=frozenset({"feed_forward_length"}),
    ),
    Architecture("qwen2vl", ("qwen2",), _KEYS, MODEL, {**ATTENTION, **GATED}, partial(_qwen2, axes=True)),
    Architecture(
        "qwen3vl",
        ("qwen3",),
        _KEYS,
        MODEL,
        {**ATTENTION, **NORMED_HEADS, **GATED},
        partial(_qwen3, axes=True),
        without_effect=_DEEPSTACK,
    ),
    Architecture(
        "qwen3vlmoe",
        ("qwen3_moe",),
        _KEYS,
        MODEL,
        {**ATTENTION, **NORMED_HEADS, **ROUTER},
        partial(_qwen3_moe, axes=True),
        optional=frozenset({"feed_forward_length"}),
        without_effect=_DEEPSTACK,
    ),
)
