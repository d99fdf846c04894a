"""Variants with recurrent layers or short convolutions."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models.settings import DELTA, EXPERTS, LOCAL_EXPERTS, MAMBA2, TIED, rotation

#: As `variants.VARIANTS`.
RECURRENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
    ),
    "mamba": ("mamba", {"state_size": 8, "use_mambapy": False, **TIED}),
    "lfm2moe": (
        "lfm2_moe",
        {
            **EXPERTS,
            **TIED,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "conv_L_cache": 3,
        },
    ),
    "qwen3next": (
        "qwen3_next",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64, **rotation(partial_rotary_factor=0.25)},
    ),
    "qwen3next: older converter": (
        "qwen3_next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64, "is_of_older_converter": True}
    ),
    "granitehybrid": (
        "granitemoehybrid",
        {
            **MAMBA2,
            **LOCAL_EXPERTS,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    "granitehybrid: dense, rotated": (
        "granitemoehybrid",
        {
            **MAMBA2,
            **TIED,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "attention_multiplier": 0.2,
            "position_embedding_type": "rope",
        },
    ),
}  # fmt: skip
