"""Qwen3.8-Flash-Next: delta nets and attention to blocks, several streams, and embeddings of sequences of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from tests.support.gguf_models.changes import plus_one, squeezed
from tests.support.gguf_models.layouts.delta_net import QWEN35, QWEN35_LAYER, SHARED_EXPERT, SHARED_WIDTH
from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, EXPERTS
from tests.support.gguf_models.layouts.layout import Layout, Place, Value, always
from tests.support.gguf_models.layouts.names import MIXED, MODEL


def hashes(name: str) -> Value:
    """Whole numbers by which sequences are hashed."""
    return lambda config: getattr(Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0), name).tolist()


def ratios(config: Any) -> list[int]:
    """How many tokens a block has, in layers that choose some."""
    kinds = config.layer_types
    return [config.indexer_compress_ratio if kind == "indexed_attention" else 0 for kind in kinds]


def queries_and_key(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Queries and the key of the indexer, which are two tensors."""
    queries, key = np.split(tensor, [config.indexer_n_heads * config.indexer_head_dim])
    return {"indexer.q_proj.weight": queries, "indexer.k_proj.weight": key}


def in_the_metadata(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """No tensor."""
    return {}


def table(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """A layer's table, which the file has without the layer's number."""
    return {"/per_layer_token_embd.weight": tensor}


def streams(path: str, name: str) -> dict[str, Place]:
    """What reads several streams as one."""
    return {
        f"{path}.hc_norm": (f"{name}_norm", plus_one),
        f"{path}.input_mix_weight_down": f"{name}_down",
        f"{path}.input_mix_weight_up": f"{name}_up",
        f"{path}.block_inject_weight": f"{name}_inject",
    }


HASHES = {
    "ple.layer_multipliers": "layer_multipliers",
    "ple.head_offsets": "ngram_heads_offsets",
    "ple.head_vocab_sizes": "ngram_heads_vocab_sizes",
}
QWEN4: dict[str, Value] = {
    **{key: value for key, value in QWEN35.items() if not key.startswith("feed")},
    **EXPERTS,
    **EXPERT_WIDTH,
    **SHARED_WIDTH,
    **{key: hashes(name) for key, name in HASHES.items()},
    "attention.compress_ratios": ratios,
    "attention.indexer.head_count": "indexer_n_heads",
    "attention.indexer.key_length": "indexer_head_dim",
    "attention.indexer.top_k": "indexer_budget",
    "hyper_connection.count": "hc_count",
    "hyper_connection.low_rank": "hc_lowrank",
    "ple.layers": lambda config: [layer - 1 for layer in config.ple_layer_ids],
    "ple.ngram_size": "ngram_size",
    "ple.heads_per_ngram": "heads_per_ngram",
    "ple.conv_kernel": "ple_conv_kernel_size",
    "ple.eos_token_id": "eos_token_id",
    "ple.image_token_id": always(3),
    "embedding_length_per_layer_input": lambda config: (
        config.ple_embed_dim // (config.ngram_size - 1) // config.heads_per_ngram
    ),
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "qwen4_exp_text": Layout(
        "qwen4exp",
        QWEN4,
        {
            **{path: place for path, place in QWEN35_LAYER.items() if path.startswith(("self_attn.", "linear_attn."))},
            **MIXED,
            **SHARED_EXPERT,
            **streams("attn_hyper_connection", "hc_attn"),
            **streams("mlp_hyper_connection", "hc_ffn"),
            "self_attn.indexer.index_qk_proj.weight": ("", queries_and_key),
            "self_attn.indexer.q_layernorm": ("indexer.q_norm", plus_one),
            "self_attn.indexer.k_layernorm": ("indexer.k_norm", plus_one),
            "ple.key_proj": "ple_key",
            "ple.value_proj": "ple_value",
            "ple.norm_key": ("ple_norm_key", plus_one),
            "ple.norm_query": ("ple_norm_query", plus_one),
            "ple.norm_conv": ("ple_norm_conv", plus_one),
            "ple.conv1d": ("ple_conv1d", squeezed),
            "ple.ple_embedding.ngram_embedding.weight": ("", table),
            **{f"ple.ple_embedding.{name}": ("", in_the_metadata) for name in HASHES.values()},
        },
        {
            **{path: place for path, place in MODEL.items() if path != "model.norm"},
            **streams("model.hyper_connection_mixer", "output_hc"),
        },
        pre="qwen35",
    ),
}
