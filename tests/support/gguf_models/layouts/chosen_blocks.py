"""MiniMax M3, whose layers attend to blocks that they choose."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import EXPERTS, USUAL
from tests.support.gguf_models.layouts.layout import Layout, Place, always
from tests.support.gguf_models.layouts.names import ATTENTION, MIXED, MODEL
from tests.support.gguf_models.layouts.rotation import ROTATED


def _halves(end: str) -> changes.Change:
    """Gate rows and then up rows."""

    def change(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
        gate, up = np.split(tensor, 2)
        return {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up}

    return change


NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.indexer.q_norm": "indexer.q_norm",
    "self_attn.indexer.k_norm": "indexer.k_norm",
}
LAYER: dict[str, Place] = {
    **ATTENTION,
    **MIXED,
    **{path: (name, changes.plus_one) for path, name in NORMS.items()},
    "self_attn.indexer.q_proj": "indexer.q_proj",
    "self_attn.indexer.k_proj": "indexer.k_proj",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate_up_proj.weight": ("", _halves("")),
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_up_proj.weight": ("", _halves("_shexp")),
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "minimax_m3_vl_text": Layout(
        "minimax-m3",
        {
            **USUAL,
            **EXPERTS,
            **ROTATED,
            "feed_forward_length": "dense_intermediate_size",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": lambda config: config.shared_intermediate_size // config.intermediate_size,
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": always(True),
            "expert_gating_func": always(2),
            "attention.indexer.head_count": "index_n_heads",
            "attention.indexer.key_length": "index_head_dim",
            "attention.indexer.top_k": "index_topk_blocks",
            "attention.indexer.block_size": "index_block_size",
            "attention.indexer.local_blocks": "index_local_blocks",
            "leading_dense_block_count": lambda config: config.mlp_layer_types.count("dense"),
        },
        LAYER,
        {**MODEL, "model.norm": ("output_norm", changes.plus_one)},
        pre="minimax-m2",
    ),
}
