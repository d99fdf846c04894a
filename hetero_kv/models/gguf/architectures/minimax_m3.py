"""MiniMax M3: a mixture of experts whose layers attend to blocks that they choose.

Sources: `conversion/minimax.py` and `src/models/minimax-m3.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    MODEL,
    NORMED_HEADS,
    RMS_NORM,
    ROUTER,
    SIGMOID,
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
from hetero_kv.models.gguf.architectures.deepseek import require_rotated
from hetero_kv.models.gguf.architectures.inverse_transforms import NORM_PLUS_ONE
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.row_parts import PartRows

DENSE = "leading_dense_block_count"


def _minimax_m3(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_rope(metadata, settings, partial=True)
    put_experts(metadata, settings, "num_local_experts", width="intermediate_size")
    shared = metadata.require("expert_shared_count", "n_shared_experts") * settings["intermediate_size"]
    settings.put("shared_intermediate_size", shared, "expert_shared_count")
    metadata.expect("expert_gating_func", SIGMOID, "is another choice of experts than the model's sigmoid")
    if not metadata.scalar("expert_weights_norm", False):
        raise metadata.unsupported("expert_weights_norm", "does not normalize weights of experts, which the model does")
    settings.put("routed_scaling_factor", metadata.scalar("expert_weights_scale", 0.0) or 1.0, "expert_weights_scale")
    # No key states them: these are llama.cpp's.
    settings.put("swiglu_alpha", 1.702)
    settings.put("swiglu_limit", 7.0)
    settings.copy("index_n_heads", "attention.indexer.head_count")
    groups = settings["num_key_value_heads"]
    if settings["index_n_heads"] != groups:
        raise metadata.unsupported("attention.indexer.head_count", f"is not the {groups} of attention.head_count_kv")
    settings.copy("index_head_dim", "attention.indexer.key_length")
    require_rotated(metadata, settings["index_head_dim"])
    settings.copy("index_topk_blocks", "attention.indexer.top_k")
    settings.copy("index_block_size", "attention.indexer.block_size")
    settings.copy("index_local_blocks", "attention.indexer.local_blocks")
    # The first layers have neither experts nor a choice of blocks.
    layers, dense = settings["num_hidden_layers"], metadata.scalar(DENSE, 0)
    first = min(dense, layers)
    settings.put("layer_types", ["full_attention"] * first + ["minimax_m3_sparse"] * (layers - first), DENSE)
    settings.put("mlp_layer_types", ["dense"] * first + ["sparse"] * (layers - first), DENSE)


def _rows(width: str, half: int) -> PartRows:
    def rows(config: Any) -> np.ndarray:
        count = getattr(config, width)
        return half * count + np.arange(count)

    return rows


def _merged(path: str, width: str) -> tuple[ParameterPlace, ParameterPlace]:
    """The places of gate and up, which are one matrix."""
    gate, up = (ParameterPlace(f"{path}.gate_up_proj", part=_rows(width, half)) for half in range(2))
    return gate, up


_GATE, _UP = _merged("mlp", "dense_intermediate_size")
_SHARED_GATE, _SHARED_UP = _merged("mlp.shared_experts", "shared_intermediate_size")
_LAYER: Places = {
    **{
        name: ParameterPlace(str(path), NORM_PLUS_ONE) if name.endswith("norm") else path
        for name, path in {
            **ATTENTION,
            **NORMED_HEADS,
            "indexer.q_norm": "self_attn.indexer.q_norm",
            "indexer.k_norm": "self_attn.indexer.k_norm",
        }.items()
    },
    **ROUTER,
    "indexer.q_proj": "self_attn.indexer.q_proj",
    "indexer.k_proj": "self_attn.indexer.k_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate": _GATE,
    "ffn_up": _UP,
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": _SHARED_GATE,
    "ffn_up_shexp": _SHARED_UP,
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

TABLES = (
    Architecture(
        "minimax-m3",
        ("minimax_m3_vl_text",),
        {**SIZES, **RMS_NORM, "feed_forward_length": "dense_intermediate_size"},
        {**MODEL, "output_norm": ParameterPlace("norm", NORM_PLUS_ONE)},
        _LAYER,
        _minimax_m3,
    ),
)
