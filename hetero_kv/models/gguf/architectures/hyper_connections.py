"""DeepSeek V4 and Hunyuan 4, whose layers pass several streams of hidden states (hyper-connections).

Sources: `conversion/deepseek.py`, `conversion/hy_v4.py` and `src/models/` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hetero_kv.models.gguf.architectures.common import (
    MODEL,
    RMS_NORM,
    ROUTER,
    SIGMOID,
    SIZES,
    put_experts,
    put_layers_without_predictors,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.deepseek import (
    GATING,
    INDEXER,
    INDEXERS,
    LATENT_LAYER,
    put_indexer,
    put_latent_attention,
    put_routed_experts,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import InverseTransform
from hetero_kv.models.gguf.architectures.mixtures import SHARED_EXPERTS
from hetero_kv.models.gguf.architectures.rope import put_rope, rope_parameters
from hetero_kv.models.gguf.architectures.sliding_windows import WINDOW

CLAMP, SHARED_CLAMP = "swiglu_clamp_exp", "swiglu_clamp_shexp"
CHOSEN, RATIOS = "attention.indexer.top_k", "attention.compress_ratios"
#: The value of `expert_gating_func` of DeepSeek V4.
SQRT_SOFTPLUS = 4
#: How many tokens become one beside those of a layer's window -> transformers' kind of the layer.
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _hy_v4(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.values["model_type"] = "hy_v4"
    put_latent_attention(metadata, settings)
    settings.copy("q_lora_rank", "attention.q_lora_rank")
    settings.values["head_dim"] = settings["qk_rope_head_dim"]
    put_rope(metadata, settings)
    if settings["rope_parameters"]["rope_type"] != "default":
        raise metadata.unsupported("rope.scaling.type", "is a scaling that llama.cpp does not compute with this model")
    metadata.expect(GATING, SIGMOID, "is another choice of experts than the model's sigmoid")
    put_routed_experts(metadata, settings)
    _put_limit(metadata, settings)
    put_streams(metadata, settings)
    settings.copy("hc_magnitude", "hyper_connection.magnitude")
    if not metadata.has(CHOSEN) and metadata.config is None:
        raise metadata.unsupported(CHOSEN, "is missing, and the model attends to tokens that it chooses")
    put_indexer(metadata, settings)
    chosen, layers = metadata.get(INDEXERS), settings["num_hidden_layers"]
    if not isinstance(chosen, tuple | list) or len(chosen) != layers or not chosen[0]:
        raise metadata.unsupported(INDEXERS, f"has not one value for each of {layers} layers, true in the first")
    settings.put("indexer_types", ["full" if each else "shared" for each in chosen], INDEXERS)


def _deepseek4(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_layers_without_predictors(metadata, settings)
    settings.copy("head_dim", "attention.key_length")
    dim, layers = settings["head_dim"], settings["num_hidden_layers"]
    metadata.expect("attention.value_length", dim, f"is not the key's {dim}")
    metadata.expect("attention.head_count_kv", 1, "is not 1, and the model has one key and value for all heads")
    settings.copy("q_lora_rank", "attention.q_lora_rank")
    settings.copy("o_groups", "attention.output_group_count")
    settings.copy("o_lora_rank", "attention.output_lora_rank")
    settings.copy("sliding_window", WINDOW)
    ratios = metadata.get(RATIOS)
    if not isinstance(ratios, tuple | list) or len(ratios) < layers or not set(ratios) <= KINDS.keys():
        raise metadata.unsupported(RATIOS, f"is not 0, 4 or 128 for each of {layers} layers")
    settings.put("layer_types", [KINDS[ratio] for ratio in ratios[:layers]], RATIOS)
    _put_two_rotations(metadata, settings)
    put_streams(metadata, settings)
    settings.copy("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations")
    put_indexer(metadata, settings)
    put_experts(metadata, settings, "n_routed_experts")
    metadata.expect("expert_shared_count", 1, "is not 1, the model's number of shared experts")
    metadata.expect(GATING, SQRT_SOFTPLUS, "is another choice of experts than the model's, by roots")
    settings.put("scoring_func", "sqrtsoftplus", GATING)
    settings.put("routed_scaling_factor", metadata.scalar("expert_weights_scale", 0.0) or 1.0, "expert_weights_scale")
    if not metadata.scalar("expert_weights_norm", False):
        raise metadata.unsupported("expert_weights_norm", "does not normalize weights of experts, which the model does")
    _put_limit(metadata, settings)
    metadata.expect(SHARED_CLAMP, settings["swiglu_limit"], f"is not {CLAMP}, and the model has one limit")
    hashed = metadata.require("hash_layer_count", "num_hash_layers")
    first = min(hashed, layers)
    settings.put("mlp_layer_types", ["hash_moe"] * first + ["moe"] * (layers - first), "hash_layer_count")


def _put_two_rotations(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put the rotation of layers with a window alone, and that of the others, which alone is scaled."""
    dim = settings["head_dim"]
    scaled, stated = rope_parameters(metadata, dim, partial=True)
    if scaled["rope_type"] not in ("default", "yarn"):
        raise metadata.unsupported("rope.scaling.type", "is a scaling that no published model has")
    metadata.expect("rope.scaling.yarn_attn_factor", 1.0, "scales rotations, which the model does not")
    metadata.expect("rope.scaling.attn_factor", 1.0, "scales rotations, which the model does not")
    settings.put("partial_rotary_factor", scaled["partial_rotary_factor"], "rope.dimension_count")
    settings.put("rope_theta", scaled["rope_theta"], "rope.freq_base")
    settings.copy("compress_rope_theta", "attention.compress_rope_freq_base")
    both = ("rope_theta", "partial_rotary_factor")
    main = {"rope_type": "default", **{name: scaled[name] for name in both}}
    compress = {**scaled, "rope_theta": float(settings["compress_rope_theta"])}
    if compress["rope_type"] == "yarn":
        compress["attention_factor"] = 1.0
    settings.values["rope_parameters"] = {"main": main, "compress": compress}
    said = {
        "main": {name: main[name] for name in both if name in stated},
        "compress": {name: compress[name] for name in {*stated, "rope_theta"}},
    }
    settings.from_file["rope_parameters"] = (metadata.key("rope.*"), said)


def _put_limit(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put by how much gates and ups of experts are limited."""
    settings.copy("swiglu_limit", CLAMP)
    if settings["swiglu_limit"] <= 0:
        raise metadata.unsupported(CLAMP, "is no limit, and the model's experts have one")


def put_streams(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put how many streams of hidden states the layers pass, and the epsilon of their gates."""
    settings.copy("hc_mult", "hyper_connection.count")
    settings.copy("hc_eps", "hyper_connection.epsilon")


def _halves(width: Callable[[Any], int] | None) -> InverseTransform:
    """Of heads of `width` rows, the last ones, which rotate: neighbours become halves.

    The published model rotates neighbours, and transformers' class halves, of the same rows.

    width: None for a single head.
    """

    def rows(count: int, config: Any) -> np.ndarray:
        dim, rotated = count if width is None else width(config), config.qk_rope_head_dim
        pairs = np.arange(dim - rotated, dim).reshape(-1, 2).T.reshape(-1)
        head = np.concatenate([np.arange(dim - rotated), pairs])
        return (np.arange(0, count, dim)[:, None] + head).reshape(-1)

    return InverseTransform(rows=rows)


#: Streams are read and written by a gate each, for attention and for what follows; the last ones become one.
STREAMS: Places = {
    f"hc_{part}_{leaf}.weight": f"{part}_hc.{leaf}" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")
}
LAST_STREAMS: Places = {f"output_hc_{leaf}.weight": f"hc_head.hc_{leaf}" for leaf in ("fn", "base", "scale")}

_INDEX_ROWS = _halves(lambda config: int(config.index_head_dim))
_LAYER: Places = {
    **LATENT_LAYER,
    **INDEXER,
    **STREAMS,
    "attn_q_b": ParameterPlace("self_attn.q_b_proj", _halves(lambda config: int(config.qk_head_dim))),
    "attn_kv_a_mqa": ParameterPlace("self_attn.kv_a_proj_with_mqa", _halves(None)),
    "indexer.attn_q_b": ParameterPlace("self_attn.indexer.wq_b", _INDEX_ROWS),
    "indexer.attn_k": ParameterPlace("self_attn.indexer.wk", _INDEX_ROWS),
    "indexer.k_norm": ParameterPlace("self_attn.indexer.k_norm", _INDEX_ROWS),
    "attn_gate": "self_attn.gate_proj",
    "attn_sinks.weight": "self_attn.sinks",
}


def _compressor(prefix: str, path: str) -> Places:
    """What makes one key and value of several."""
    return {
        f"{prefix}_kv": f"{path}.kv_proj",
        f"{prefix}_gate": f"{path}.gate_proj",
        f"{prefix}_ape.weight": f"{path}.position_bias",
        f"{prefix}_norm": f"{path}.kv_norm",
    }


_COMPRESSED = "self_attn.compressor"
_COMPRESSING_LAYER: Places = {
    **ROUTER,
    **SHARED_EXPERTS,
    **STREAMS,
    **_compressor("attn_compressor", _COMPRESSED),
    **_compressor("indexer_compressor", f"{_COMPRESSED}.indexer"),
    "indexer.attn_q_b": f"{_COMPRESSED}.indexer.q_b_proj",
    "indexer.proj": f"{_COMPRESSED}.indexer.scorer.weights_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv": "self_attn.kv_proj",
    "attn_kv_a_norm": "self_attn.kv_norm",
    "attn_output_a": "self_attn.o_a_proj",
    "attn_output_b": "self_attn.o_b_proj",
    "attn_sinks.weight": "self_attn.sinks",
    # The experts of each token of the vocabulary, in the first layers.
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
}

TABLES = (
    Architecture(
        "deepseek4",
        ("deepseek_v4",),
        {key: name for key, name in {**SIZES, **RMS_NORM}.items() if key != "feed_forward_length"},
        {**MODEL, **LAST_STREAMS},
        _COMPRESSING_LAYER,
        _deepseek4,
        predicts=True,
        without_effect={
            "feed_forward_length": "every layer has experts",
            "embedding_length_out": "that of all streams, which llama.cpp's draft models read",
        },
    ),
    Architecture("hy_v4", ("hy_v4",), {**SIZES, **RMS_NORM}, {**MODEL, **LAST_STREAMS}, _LAYER, _hy_v4),
)
