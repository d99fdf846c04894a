"""Qwen3.8-Flash-Next: delta nets, attention to chosen blocks, several streams, and embeddings of sequences of tokens.

Sources: `conversion/qwen4exp.py` and `src/models/qwen4exp.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.common import MODEL, RMS_NORM, ROUTER, SIZES, put_experts
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.delta_net import LAYER, RECURRENT, put_delta_net
from hetero_kv.models.gguf.architectures.inverse_transforms import CONVOLUTION, NORM_PLUS_ONE
from hetero_kv.models.gguf.architectures.qwen import SHARED_EXPERT
from hetero_kv.models.gguf.metadata_ranges import INTEGER_RANGES

CHOSEN, RATIOS = "attention.indexer.top_k", "attention.compress_ratios"
#: The layer that adds embeddings of sequences of tokens. A sequence is hashed, once for each head.
WITH_SEQUENCES, WIDTH = "ple.layers", "embedding_length_per_layer_input"
MULTIPLIERS, OFFSETS, SIZES_OF_HEADS = "ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes"
TABLE, EMBEDDING = "per_layer_token_embd", "token_embd"
#: Products of tokens and multipliers are whole numbers below this.
LARGEST_PRODUCT = 1 << 63
_HASHES = "ple.ple_embedding"


def _qwen4_exp(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_delta_net(metadata, settings, axes=True)
    kinds = ["indexed_attention" if kind == "full_attention" else kind for kind in settings["layer_types"]]
    settings.put("layer_types", kinds, RECURRENT)
    put_experts(metadata, settings, "num_experts")
    settings.copy("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
    # Constants of llama.cpp.
    settings.put("norm_topk_prob", True)
    settings.put("output_gate_type", "sigmoid")
    settings.copy("hc_count", "hyper_connection.count")
    settings.copy("hc_lowrank", "hyper_connection.low_rank")
    _put_indexer(metadata, settings, kinds)
    if metadata.has(WITH_SEQUENCES):
        _put_sequences(metadata, settings, kinds)


def _put_indexer(metadata: MetadataReader, settings: ConfigSettings, kinds: list[str]) -> None:
    """Put how many blocks of tokens the layers that attend choose, and by which heads."""
    settings.copy("indexer_n_heads", "attention.indexer.head_count")
    settings.copy("indexer_head_dim", "attention.indexer.key_length")
    settings.copy("indexer_budget", CHOSEN)
    settings.put("indexer_kv_heads", 1)
    ratios = tuple(metadata.get(RATIOS, ()))
    ratio = max(ratios, default=0)
    if ratio < 1 or ratios != tuple(ratio if kind == "indexed_attention" else 0 for kind in kinds):
        raise metadata.unsupported(RATIOS, f"is not one number in the layers of {len(kinds)} that attend, and 0 else")
    settings.put("indexer_compress_ratio", ratio, RATIOS)
    if settings["indexer_budget"] % ratio:
        raise metadata.unsupported(CHOSEN, f"is no multiple of the {ratio} tokens of a block")
    rotated = int(settings["head_dim"] * settings["rope_parameters"].get("partial_rotary_factor", 1.0))
    if rotated > settings["indexer_head_dim"]:
        raise metadata.unsupported("attention.indexer.key_length", f"is less than the {rotated} numbers that rotate")


def _put_sequences(metadata: MetadataReader, settings: ConfigSettings, kinds: list[str]) -> None:
    """Put the sizes of the embeddings of sequences, and require hashes that stay within them."""
    layers = tuple(metadata.get(WITH_SEQUENCES))
    if len(layers) != 1 or not 0 <= layers[0] < len(kinds) or kinds[layers[0]] != "linear_attention":
        raise metadata.unsupported(WITH_SEQUENCES, "is not one layer with a delta net")
    settings.put("ple_layer_ids", [layers[0] + 1], WITH_SEQUENCES)
    settings.copy("ngram_size", "ple.ngram_size")
    settings.copy("heads_per_ngram", "ple.heads_per_ngram")
    settings.copy("ple_conv_kernel_size", "ple.conv_kernel")
    longest, (rows, width) = settings["ngram_size"], _shape(metadata, TABLE)
    heads = (longest - 1) * settings["heads_per_ngram"]
    metadata.expect(WIDTH, width, f"is not the {width} columns of {TABLE}.weight")
    settings.put("ple_embed_dim", width * heads, WIDTH)
    tokens = _shape(metadata, EMBEDDING)[0]
    if not all(0 < each * (tokens - 1) < LARGEST_PRODUCT for each in _numbers(metadata, MULTIPLIERS, longest)):
        raise metadata.unsupported(MULTIPLIERS, "is not above 0, or too large for this many tokens")
    offsets, sizes = _numbers(metadata, OFFSETS, heads), _numbers(metadata, SIZES_OF_HEADS, heads)
    if min(offsets) < 0 or min(sizes) < 1 or max(map(sum, zip(offsets, sizes, strict=True))) > rows:
        raise metadata.unsupported(OFFSETS, f"and {SIZES_OF_HEADS} are not within the {rows} rows of {TABLE}.weight")
    # Of these, the class makes a table of as many rows.
    settings.put("ngram_vocab_size_base", sizes[0])
    settings.put("make_ngram_vocab_size_divisible_by", rows)
    end = metadata.require("ple.eos_token_id", "eos_token_id")
    if end >= tokens:
        raise metadata.unsupported("ple.eos_token_id", f"is none of {tokens} tokens")
    settings.put("eos_token_id", end, "ple.eos_token_id")


def _numbers(metadata: MetadataReader, suffix: str, count: int) -> tuple[int, ...]:
    found = tuple(metadata.get(suffix, ()))
    if len(found) != count:
        raise metadata.unsupported(suffix, f"has not {count} numbers")
    return found


def _shape(metadata: MetadataReader, name: str) -> tuple[int, ...]:
    for tensor in metadata.file.tensors:
        if tensor.name == f"{name}.weight" and len(tensor.shape) == 2:
            return tensor.shape
    raise ModelError(f"{str(metadata.file.path)!r} has no matrix {name}.weight; give the file of a whole model")


def _index_queries(config: Any) -> np.ndarray:
    return np.arange(config.indexer_n_heads * config.indexer_head_dim)


def _index_keys(config: Any) -> np.ndarray:
    return config.indexer_n_heads * config.indexer_head_dim + np.arange(config.indexer_head_dim)


def _norm(path: str) -> ParameterPlace:
    return ParameterPlace(path, NORM_PLUS_ONE)


def _streams(prefix: str, path: str) -> Places:
    """What reads several streams as one."""
    return {
        f"{prefix}_norm": _norm(f"{path}.hc_norm"),
        f"{prefix}_down": f"{path}.input_mix_weight_down",
        f"{prefix}_up": f"{path}.input_mix_weight_up",
    }


_LAYER: Places = {
    **{name: place for name, place in LAYER.items() if name not in ("attn_norm", "post_attention_norm")},
    **ROUTER,
    **SHARED_EXPERT,
    **_streams("hc_attn", "attn_hyper_connection"),
    **_streams("hc_ffn", "mlp_hyper_connection"),
    "hc_attn_inject": "attn_hyper_connection.block_inject_weight",
    "hc_ffn_inject": "mlp_hyper_connection.block_inject_weight",
    "indexer.q_proj": ParameterPlace("self_attn.indexer.index_qk_proj", part=_index_queries),
    "indexer.k_proj": ParameterPlace("self_attn.indexer.index_qk_proj", part=_index_keys),
    "indexer.q_norm": _norm("self_attn.indexer.q_layernorm"),
    "indexer.k_norm": _norm("self_attn.indexer.k_layernorm"),
    "ple_key": "ple.key_proj",
    "ple_value": "ple.value_proj",
    "ple_norm_key": _norm("ple.norm_key"),
    "ple_norm_query": _norm("ple.norm_query"),
    "ple_norm_conv": _norm("ple.norm_conv"),
    "ple_conv1d": ParameterPlace("ple.conv1d", CONVOLUTION),
}
_LAYERS = range(INTEGER_RANGES["block_count"].maximum)

TABLES = (
    Architecture(
        "qwen4exp",
        ("qwen4_exp_text",),
        {key: name for key, name in {**SIZES, **RMS_NORM}.items() if key != "feed_forward_length"},
        {
            **{name: place for name, place in MODEL.items() if name != "output_norm"},
            **_streams("output_hc", "hyper_connection_mixer"),
            # The table of the one layer that has one.
            TABLE: tuple(f"layers.{layer}.{_HASHES}.ngram_embedding" for layer in _LAYERS),
        },
        _LAYER,
        _qwen4_exp,
        without_effect={
            "feed_forward_length": "every layer has experts",
            "ple.image_token_id": "stands for images, and a text has none",
        },
        arrays={
            f"{_HASHES}.layer_multipliers": MULTIPLIERS,
            f"{_HASHES}.ngram_heads_offsets": OFFSETS,
            f"{_HASHES}.ngram_heads_vocab_sizes": SIZES_OF_HEADS,
        },
    ),
)
